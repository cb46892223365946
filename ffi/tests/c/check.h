// What the programs in C that test the library check by. A program brings `check`, `said` and `distract`.
#pragma once

#define CHECK(condition) check((condition), #condition, __LINE__)
#define FAILS(call, message)                                       \
    do {                                                           \
        distract();                                                \
        check((call) == ROTE_ERROR, #call " fails", __LINE__);     \
        check(said(message), #call " says: " #message, __LINE__);  \
    } while (0)
#define GIVES_NULL(call, message)                                  \
    do {                                                           \
        distract();                                                \
        check((call) == NULL, #call " gives null", __LINE__);      \
        check(said(message), #call " says: " #message, __LINE__);  \
    } while (0)
