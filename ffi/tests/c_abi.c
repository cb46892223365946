// Rote from C: what works without PyTorch, and what happens to wrong calls.
//
//     c_abi MISSING GARBAGE PLAN      (paths; the last is a plan that is valid)

#include <rote.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

static void check(int holds, const char *what, int line) {
    if (!holds) {
        failures++;
        printf("line %d: %s\n  the last error is: %s\n", line, what, rote_last_error());
    }
}

static int said(const char *part) {
    return strstr(rote_last_error(), part) != NULL;
}

// Leaves a message behind, so that one seen later is known to be new.
static void distract(void) {
    rote_plan_check("elsewhere");
}

#define CHECK(condition) check((condition), #condition, __LINE__)
#define FAILS(call, message)                                       \
    do {                                                           \
        distract();                                                \
        check((call) == ROTE_ERROR, #call " fails", __LINE__);     \
        check(said(message), #call " says: " #message, __LINE__);   \
    } while (0)
#define GIVES_NULL(call, message)                                  \
    do {                                                           \
        distract();                                                \
        check((call) == NULL, #call " gives null", __LINE__);      \
        check(said(message), #call " says: " #message, __LINE__);   \
    } while (0)

static void plans(const char *missing, const char *garbage, const char *plan) {
    CHECK(rote_plan_check(plan) == ROTE_OK);
    FAILS(rote_plan_check(missing), "No such file");
    CHECK(said(missing));
    FAILS(rote_plan_check(garbage), "a plan starts with");
    FAILS(rote_plan_check(NULL), "No such file");
    FAILS(rote_plan_check("\xff"), "UTF-8");
}

static void sources(void) {
    CHECK(rote_bridge_source_count() > 0);
    CHECK(strcmp(rote_bridge_source_name(0), "bridge.cpp") == 0);
    for (uint32_t i = 0; i < rote_bridge_source_count(); i++) {
        CHECK(strlen(rote_bridge_source_text(i)) > 0);
    }
    CHECK(rote_bridge_source_name(rote_bridge_source_count()) == NULL);
    CHECK(rote_bridge_source_text(UINT32_MAX) == NULL);
}

// Without a bridge there are no sessions, so every handle here is null.
static void nulls(void) {
    const char *no_session = "the session is null";
    uint32_t index = 0;
    void *results = NULL;
    int bound = 0;

    FAILS(rote_load_bridge(NULL, NULL, NULL), "bridge");
    FAILS(rote_load_bridge("/nowhere/bridge.so", NULL, NULL), "/nowhere/bridge.so");
    GIVES_NULL(rote_session_new(NULL, NULL, 1, 0, NULL, 8), "rote_load_bridge");
    FAILS(rote_mark_replayed(NULL), "bridge");
    rote_session_free(NULL);

    FAILS(rote_session_call(NULL, NULL, NULL, &index, &results), no_session);
    FAILS(rote_session_replay_last(NULL, &index, &results), no_session);
    GIVES_NULL(rote_session_stats(NULL), no_session);
    GIVES_NULL(rote_session_explain(NULL), no_session);
    GIVES_NULL(rote_session_variant(NULL, 0), "variant");
    CHECK(rote_session_notice(NULL) == NULL);

    FAILS(rote_record_begin(NULL), no_session);
    FAILS(rote_record_leaf(NULL, NULL), no_session);
    FAILS(rote_record_spec(NULL, NULL, NULL), no_session);
    FAILS(rote_record_tensor(NULL, 0, NULL, NULL, NULL, ROTE_NO_INDEX, ROTE_NO_INDEX), no_session);
    FAILS(rote_record_fact(NULL, 0, NULL, NULL, 0, NULL, NULL, 0), no_session);
    FAILS(rote_record_guard(NULL, 0, NULL, NULL), no_session);
    FAILS(rote_record_generator(NULL, 0, -1), no_session);
    FAILS(rote_record_ready(NULL), no_session);
    FAILS(rote_record_trust(NULL, &bound), no_session);
    FAILS(rote_record_op(NULL, NULL, NULL, NULL, NULL, NULL), no_session);
    FAILS(rote_record_random(NULL, NULL), no_session);
    FAILS(rote_record_rng(NULL, 0, 0, -1, NULL, NULL), no_session);
    FAILS(rote_record_global_begin(NULL, NULL, NULL, 0, NULL), no_session);
    FAILS(rote_record_global_end(NULL, NULL, 0), no_session);
    FAILS(rote_record_redistribute_begin(NULL, 0, 0, NULL), no_session);
    FAILS(rote_record_redistribute_end(NULL), no_session);
    FAILS(rote_record_float(NULL, 0, 0, 0, 0.0, NULL, NULL), no_session);
    FAILS(rote_record_pin(NULL, 0), no_session);
    FAILS(rote_record_group(NULL, NULL, NULL, 0, NULL), no_session);
    FAILS(rote_record_output(NULL, NULL, NULL, ROTE_NO_INDEX, 0), no_session);
    FAILS(rote_record_grad(NULL, NULL, NULL, ROTE_NO_INDEX), no_session);
    FAILS(rote_record_refuse(NULL, NULL, NULL, NULL, NULL), no_session);
    FAILS(rote_record_survivors(NULL, NULL), no_session);
    GIVES_NULL(rote_record_groups(NULL), no_session);
    FAILS(rote_record_abort(NULL), no_session);
    GIVES_NULL(rote_record_finish(NULL, NULL), no_session);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        return 2;
    }
    CHECK(strlen(rote_last_error()) == 0);
    CHECK(strcmp(rote_version(), ROTE_EXPECTED_VERSION) == 0);
    plans(argv[1], argv[2], argv[3]);
    sources();
    nulls();
    return failures != 0;
}
