// Rote from C: what works without PyTorch, and what happens to wrong calls.
//
//     c_abi MISSING GARBAGE PLAN BRIDGE STORE
//
// Paths: no file, a file that is no plan, a valid plan, a bridge that does
// nothing (stub_bridge.c), and a directory for plans.

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

static int messages = 0;

static void count_message(int level, const char *target, const char *message) {
    (void)level, (void)target, (void)message;
    messages++;
}

static void logging(void) {
    FAILS(rote_set_log(NULL), "`callback` is null");
    CHECK(rote_set_log(count_message) == ROTE_OK);
    CHECK(rote_set_log(count_message) == ROTE_OK);
    FAILS(rote_set_log(NULL), "`callback` is null");
    CHECK(messages == 0);
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

// With a session, a place to write to that is null is an error, and so is a
// number that stands for nothing.
static void nulls_in_a_session(const char *bridge, const char *store) {
    uint32_t index = 0;
    void *results = NULL;
    int object = 0;

    CHECK(rote_load_bridge(bridge, &object, &object) == ROTE_OK);
    RoteSession *session = rote_session_new("f", "stub 1", 1, 0, store, 8);
    CHECK(session != NULL);
    FAILS(rote_mark_replayed(NULL), "`tensor` is null");
    FAILS(rote_session_call(session, &object, &object, NULL, &results), "`variant` is null");
    FAILS(rote_session_call(session, &object, &object, &index, NULL), "`results` is null");
    FAILS(rote_session_call(session, NULL, &object, &index, &results), "`args` is null");
    FAILS(rote_session_call(session, &object, NULL, &index, &results), "`kwargs` is null");
    FAILS(rote_session_replay_last(session, NULL, &results), "`variant` is null");
    FAILS(rote_session_replay_last(session, &index, NULL), "`results` is null");
    GIVES_NULL(rote_session_variant(session, 7), "no such variant");
    FAILS(rote_record_leaf(session, "x"), "no recording is in progress");

    CHECK(rote_record_begin(session) == ROTE_OK);
    const char *spec = "cpu|2|tp|0,1|S(0)|8,4|4,1";
    CHECK(rote_record_spec(session, spec, &index) == ROTE_OK && index == 0);
    FAILS(rote_record_spec(session, spec, NULL), "`index` is null");
    FAILS(rote_record_spec(session, "cpu|2", &index), "is not a spec");
    FAILS(rote_record_tensor(session, 3, "x", &object, &object, 0, 0), "3 is no kind of binding");
    FAILS(rote_record_tensor(session, ROTE_BINDING_ARG, "x", &object, NULL, 0, 0), "`local` is null");
    FAILS(rote_record_tensor(session, ROTE_BINDING_ARG, "x", NULL, &object, 0, 0), "`object` is null");
    FAILS(rote_record_fact(session, 0, NULL, NULL, 0, "x", "1", 0), "`container` is null");
    FAILS(rote_record_fact(session, 8, &object, NULL, 0, "x", "1", 0), "8 is no kind of fact");
    FAILS(rote_record_fact(session, 0, &object, NULL, 6, "x", "1", 0), "6 is no kind of guard");
    FAILS(rote_record_guard(session, 6, "x", "1"), "6 is no kind of guard");
    CHECK(rote_record_guard(session, ROTE_GUARD_WORLD, "world", "1") == ROTE_OK);
    FAILS(rote_record_generator(session, 256, 0), "no device");
    FAILS(rote_record_op(session, NULL, &object, NULL, &object, ""), "`func` is null");
    FAILS(rote_record_rng(session, 0, 0, -1, NULL, ""), "`slot` is null");
    FAILS(rote_record_rng(session, 2, 0, -1, &index, ""), "2 is no generator action");
    FAILS(rote_record_global_begin(session, "op", NULL, 2, ""), "a list of 2 entries is null");
    FAILS(rote_record_float(session, 1, 0, 0, 1.0, "", NULL), "`index` is null");
    CHECK(rote_record_float(session, 1, 0, 0, 1.0, "", &index) == ROTE_OK && index == 0);
    FAILS(rote_record_float(session, 3, 0, 9, 1.0, "", &index), "float 9 is not followed");
    FAILS(rote_record_float(session, 8, 0, 0, 1.0, "", &index), "8 is no kind of float");
    FAILS(rote_record_pin(session, 9), "float 9 is not followed");
    FAILS(rote_record_output(session, "x", NULL, ROTE_NO_INDEX, 0), "`local` is null");
    FAILS(rote_record_survivors(session, NULL), "`count` is null");
    FAILS(rote_record_trust(session, NULL), "`bound` is null");
    CHECK(rote_record_refuse(session, "op", "a.py:1", "reason", "remedy") == ROTE_REFUSED);
    CHECK(rote_record_abort(session) == ROTE_OK);
    rote_session_free(session);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        return 2;
    }
    CHECK(strlen(rote_last_error()) == 0);
    CHECK(strcmp(rote_version(), ROTE_EXPECTED_VERSION) == 0);
    plans(argv[1], argv[2], argv[3]);
    sources();
    logging();
    nulls();
    nulls_in_a_session(argv[4], argv[5]);
    return failures != 0;
}
