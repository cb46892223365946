// Rote from C: what works without PyTorch, and what happens to wrong calls.
//
//     c_abi MISSING GARBAGE PLAN BRIDGE STORE RECORDED
//
// Paths: no file, a file that is no plan, a valid plan, a bridge that does
// nothing (stub_bridge.c), a directory for plans, and where to write one.

#include <rote_torch.h>
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

#include "c/check.h"

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

    FAILS(rote_load_bridge(NULL), "bridge");
    FAILS(rote_load_bridge("/nowhere/bridge.so"), "/nowhere/bridge.so");
    GIVES_NULL(rote_session_new(NULL, NULL, 1, 0, NULL, 8, NULL), "rote_load_bridge");
    CHECK(rote_session_free(NULL) == ROTE_OK);

    FAILS(rote_session_call(NULL, NULL, NULL, &index, &results), no_session);
    FAILS(rote_session_call_within(NULL, NULL, NULL, &index, &results), no_session);
    FAILS(rote_session_agree_in(NULL, "0", &bound), no_session);
    FAILS(rote_session_world(NULL, NULL, 1, 0), no_session);
    FAILS(rote_session_replay_last(NULL, &index, &results), no_session);
    GIVES_NULL(rote_session_stats(NULL), no_session);
    GIVES_NULL(rote_session_explain(NULL), no_session);
    GIVES_NULL(rote_session_variant(NULL, 0), no_session);
    CHECK(rote_session_notice(NULL) == NULL);

    FAILS(rote_record_begin(NULL), no_session);
    FAILS(rote_record_resume(NULL, 0, &bound), no_session);
    FAILS(rote_record_survey(NULL, &index), no_session);
    FAILS(rote_record_is_first(NULL, &bound), no_session);
    FAILS(rote_record_leaf(NULL, NULL, NULL), no_session);
    FAILS(rote_record_spec(NULL, NULL, NULL), no_session);
    FAILS(rote_record_tensor(NULL, 0, NULL, NULL, NULL, ROTE_NO_INDEX, ROTE_NO_INDEX), no_session);
    FAILS(rote_record_facts(NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL), no_session);
    FAILS(rote_record_guard(NULL, 0, NULL, NULL), no_session);
    FAILS(rote_record_generator(NULL, 0, -1), no_session);
    FAILS(rote_record_ready(NULL), no_session);
    FAILS(rote_record_trust(NULL, &index, &bound), no_session);
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
    GIVES_NULL(rote_record_met(NULL), no_session);
    FAILS(rote_record_abort(NULL), no_session);
    GIVES_NULL(rote_record_finish(NULL, NULL), no_session);
}

// With a session, a place to write to that is null is an error, and so is a
// number that stands for nothing.
static void nulls_in_a_session(const char *bridge, const char *store) {
    uint32_t index = 0;
    int bound = 0;
    void *results = NULL;
    int object = 0;

    CHECK(rote_load_bridge(bridge) == ROTE_OK);
    RoteSession *session = rote_session_new("f", "stub 1", 1, 0, store, 8, NULL);
    CHECK(session != NULL);
    FAILS(rote_session_call(session, &object, &object, NULL, &results), "`variant` is null");
    FAILS(rote_session_call(session, &object, &object, &index, NULL), "`results` is null");
    FAILS(rote_session_call(session, NULL, &object, &index, &results), "`args` is null");
    FAILS(rote_session_call(session, &object, NULL, &index, &results), "`kwargs` is null");
    FAILS(rote_session_call_within(session, NULL, &object, &index, &results), "`args` is null");
    FAILS(rote_session_agree_in(session, "0", NULL), "`agrees` is null");
    FAILS(rote_session_replay_last(session, NULL, &results), "`variant` is null");
    FAILS(rote_session_replay_last(session, &index, NULL), "`results` is null");
    GIVES_NULL(rote_session_variant(session, 7), "no such variant");
    FAILS(rote_record_leaf(session, "x", NULL), "no recording is in progress");
    FAILS(rote_record_resume(session, 0, &bound), "no recording");
    FAILS(rote_record_survey(session, &index), "no recording");

    CHECK(rote_record_begin(session) == ROTE_OK);
    const char *spec = "cpu|2|tp|0,1|S(0)|8,4|4,1";
    CHECK(rote_record_spec(session, spec, &index) == ROTE_OK && index == 0);
    FAILS(rote_record_spec(session, spec, NULL), "`index` is null");
    FAILS(rote_record_spec(session, "cpu|2", &index), "is not a spec");
    FAILS(rote_record_tensor(session, 3, "x", &object, &object, 0, 0), "3 is not a kind of binding");
    FAILS(rote_record_tensor(session, ROTE_BINDING_ARG, "x", &object, NULL, 0, 0), "`local` is null");
    FAILS(rote_record_tensor(session, ROTE_BINDING_ARG, "x", NULL, &object, 0, 0), "`object` is null");
    const uint32_t none = 0, unknown = 99, no_guard = 6;
    const uint8_t no_rate = 0;
    void *nothing = NULL, *container = &object;
    FAILS(rote_record_facts(session, 1, &none, &nothing, &nothing, &none, &no_rate, "x\0001"), "`container` is null");
    FAILS(rote_record_facts(session, 1, &unknown, &container, &nothing, &none, &no_rate, "x\0001"),
          "99 is not a kind of fact");
    FAILS(rote_record_facts(session, 1, &none, &container, &nothing, &no_guard, &no_rate, "x\0001"),
          "6 is not a kind of guard");
    FAILS(rote_record_facts(session, 2, NULL, &container, &nothing, &none, &no_rate, ""), "a list of 2 entries is null");
    FAILS(rote_record_guard(session, 6, "x", "1"), "6 is not a kind of guard");
    CHECK(rote_record_guard(session, ROTE_GUARD_WORLD, "world", "1") == ROTE_OK);
    FAILS(rote_record_generator(session, 256, 0), "not a device");
    FAILS(rote_record_op(session, NULL, &object, NULL, &object, ""), "`func` is null");
    FAILS(rote_record_rng(session, 0, 0, -1, NULL, ""), "`slot` is null");
    FAILS(rote_record_rng(session, 2, 0, -1, &index, ""), "2 is not a generator action");
    FAILS(rote_record_global_begin(session, "op", NULL, 2, ""), "a list of 2 entries is null");
    FAILS(rote_record_float(session, 1, 0, 0, 1.0, "", NULL), "`index` is null");
    CHECK(rote_record_float(session, 1, 0, 0, 1.0, "", &index) == ROTE_OK && index == 0);
    FAILS(rote_record_float(session, 3, 0, 9, 1.0, "", &index), "float 9 is not followed");
    FAILS(rote_record_float(session, 8, 0, 0, 1.0, "", &index), "8 is not a kind of followed float");
    FAILS(rote_record_pin(session, 9), "float 9 is not followed");
    FAILS(rote_record_output(session, "x", NULL, ROTE_NO_INDEX, 0), "`local` is null");
    FAILS(rote_record_survivors(session, NULL), "`count` is null");
    FAILS(rote_record_trust(session, &index, NULL), "`bound` is null");
    CHECK(rote_record_refuse(session, "op", "a.py:1", "reason", "remedy") == ROTE_REFUSED);
    CHECK(rote_record_abort(session) == ROTE_OK);
    CHECK(rote_session_free(session) == ROTE_OK);
    FAILS(rote_session_free(session), "the session was freed");
}

#define F32 6
#define ROWS 4
#define COLUMNS 8

// A contiguous f32 tensor of 4 x 8 that fills a storage.
static RoteTensor tensor(uint64_t storage) {
    static const int64_t sizes[] = {ROWS, COLUMNS}, strides[] = {COLUMNS, 1};
    RoteTensor tensor = {.storage = storage, .sizes = sizes, .strides = strides, .ndim = 2};
    tensor.storage_bytes = ROWS * COLUMNS * sizeof(float);
    tensor.dtype = F32;
    tensor.device_index = -1;
    return tensor;
}

static RoteArg argument(const RoteTensor *tensor) {
    RoteArg arg = {.tag = ROTE_ARG_TENSOR, .len = 1};
    arg.payload.tensors = tensor;
    return arg;
}

static RoteArg words(const char *words) {
    RoteArg arg = {.tag = ROTE_ARG_STR};
    arg.payload.s = words;
    return arg;
}

static int op(RoteRecorder *recorder, const char *name, const RoteArg *args, uint32_t nargs,
              const RoteTensor *result, const char *source) {
    RoteArg out = argument(result);
    RoteOp op = {.name = name, .overload = "", .args = args, .outs = &out};
    op.nargs = nargs;
    op.nouts = 1;
    return rote_recorder_op(recorder, &op, source);
}

// relu(all_reduce(x * w)): three ops, and the wait for the collective.
static void record(const char *path) {
    RoteTensor x = tensor(1), w = tensor(2), product = tensor(3), sum = tensor(4), y = tensor(5);
    const int64_t ranks[] = {0, 1};
    const char *spec = "cpu|2|tp|0,1|S(0)|8,8|8,1";
    RoteArg factors[] = {argument(&x), argument(&w)};
    RoteArg reduced[] = {argument(&product), words("sum"), words("0")};
    RoteArg waited[] = {argument(&sum)}, last[] = {argument(&sum)};

    RoteRecorder *recorder = rote_recorder_new("step.c:step", "c 1", 2, 1);
    CHECK(recorder != NULL);
    CHECK(rote_recorder_name_tensor(recorder, ROTE_BINDING_ARG, "x", &x, spec) == ROTE_OK);
    CHECK(rote_recorder_name_tensor(recorder, ROTE_BINDING_STATE, "w", &w, NULL) == ROTE_OK);
    CHECK(op(recorder, "aten::mul", factors, 2, &product, "step.c:1") == ROTE_OK);
    CHECK(op(recorder, "_c10d_functional::all_reduce", reduced, 3, &sum, "step.c:2") == ROTE_OK);
    CHECK(op(recorder, "_c10d_functional::wait_tensor", waited, 1, &sum, "step.c:2") == ROTE_OK);
    CHECK(op(recorder, "aten::relu", last, 1, &y, "step.c:3") == ROTE_OK);
    CHECK(rote_recorder_output(recorder, "result", &y, spec) == ROTE_OK);
    CHECK(rote_recorder_group(recorder, "0", ranks, 2, "tp") == ROTE_OK);
    CHECK(rote_recorder_finish(recorder, "{\"t\": 0}", path) == ROTE_OK);
    CHECK(rote_plan_check(path) == ROTE_OK);
    FAILS(rote_recorder_finish(recorder, NULL, path), "the recording is over");
    FAILS(op(recorder, "aten::relu", last, 1, &y, ""), "the recording is over");
    rote_recorder_free(recorder);
}

// What cannot be proven right is refused, with the op, the line and the remedy.
static void refusals(const char *missing) {
    RoteTensor x = tensor(1), stranger = tensor(9), y = tensor(5);
    RoteArg known[] = {argument(&x)}, unknown[] = {argument(&stranger)};

    RoteRecorder *recorder = rote_recorder_new("f", "c 1", 1, 0);
    CHECK(rote_recorder_name_tensor(recorder, ROTE_BINDING_ARG, "x", &x, NULL) == ROTE_OK);
    CHECK(op(recorder, "aten::relu", unknown, 1, &y, "step.c:7") == ROTE_REFUSED);
    CHECK(said("aten::relu at step.c:7") && said("argument 0") && said("remedy"));
    distract();
    CHECK(op(recorder, "aten::relu", known, 1, &y, "step.c:8") == ROTE_REFUSED);
    CHECK(said("step.c:7"));
    CHECK(rote_recorder_finish(recorder, NULL, missing) == ROTE_REFUSED);
    FAILS(rote_plan_check(missing), "No such file");
    rote_recorder_free(recorder);
}

static void wrong_recordings(const char *missing) {
    RoteTensor x = tensor(1), y = tensor(5), long_one = tensor(6), shapeless = tensor(7);
    RoteArg args[] = {argument(&x), words("sum"), words("0")}, bad = argument(NULL);
    RoteOp nameless = {.args = args, .nargs = 1};
    long_one.offset = 1;
    shapeless.sizes = NULL;

    GIVES_NULL(rote_recorder_new("f", "c 1", 2, 2), "rank 2 is not below");
    FAILS(rote_recorder_op(NULL, &nameless, ""), "the recorder is null");
    FAILS(rote_recorder_finish(NULL, NULL, missing), "the recorder is null");
    rote_recorder_free(NULL);

    RoteRecorder *recorder = rote_recorder_new("f", "c 1", 1, 0);
    FAILS(rote_recorder_op(recorder, NULL, ""), "the op is null");
    FAILS(rote_recorder_op(recorder, &nameless, ""), "no name");
    FAILS(op(recorder, "aten::relu", NULL, 1, &y, ""), "the list of arguments is null");
    FAILS(op(recorder, "aten::relu", &bad, 1, &y, ""), "argument 0 is null");
    bad.tag = ROTE_ARG_LIST, bad.len = 1, bad.payload.list = &bad;
    FAILS(op(recorder, "aten::relu", &bad, 1, &y, ""), "nests more than 8 deep");
    bad.tag = 99;
    FAILS(op(recorder, "aten::relu", &bad, 1, &y, ""), "the tag 99");
    FAILS(op(recorder, "aten::relu", args, 1, &long_one, ""), "bytes 4 to 132 of a storage of 128");
    FAILS(op(recorder, "aten::relu", args, 1, &shapeless, ""), "no sizes");
    FAILS(rote_recorder_name_tensor(recorder, 0, "x", NULL, NULL), "the tensor x is null");
    FAILS(rote_recorder_name_tensor(recorder, 3, "x", &x, NULL), "not a kind of binding");
    FAILS(rote_recorder_name_tensor(recorder, 0, "x", &x, "S(0)"), "is not a spec");
    FAILS(rote_recorder_output(recorder, "x", NULL, NULL), "the tensor x is null");
    FAILS(rote_recorder_group(recorder, "0", NULL, 2, "tp"), "is null");

    // A group without ranks: nothing is written.
    CHECK(rote_recorder_name_tensor(recorder, 0, "x", &x, NULL) == ROTE_OK);
    CHECK(op(recorder, "_c10d_functional::all_reduce", args, 3, &y, "") == ROTE_OK);
    FAILS(rote_recorder_finish(recorder, NULL, missing), "no member");
    FAILS(rote_plan_check(missing), "No such file");
    rote_recorder_free(recorder);
}

static const RotePlacement replicate = {.kind = ROTE_REPLICATE}, rows = {.kind = ROTE_SHARD, .dim = 0},
                           columns = {.kind = ROTE_SHARD, .dim = 1};

// `mm` of a tensor that lies so by another, on a mesh of 4 ranks.
static int product(RotePropagator *propagator, const RotePlacement *a, const RotePlacement *b, RoteAnswer *answer) {
    static const int64_t shapes[2][2] = {{64, 32}, {32, 128}};
    const RoteSpec tensors[2] = {{.shape = shapes[0], .placements = a, .ndim = 2, .dtype = 6},
                                 {.shape = shapes[1], .placements = b, .ndim = 2, .dtype = 6}};
    const RoteArg args[2] = {{.tag = ROTE_ARG_INPUT, .payload.i = 0}, {.tag = ROTE_ARG_INPUT, .payload.i = 1}};
    const RoteQuestion question = {.op = "aten::mm", .args = args, .tensors = tensors, .nargs = 2, .ntensors = 2};
    return rote_propagate(propagator, &question, answer);
}

static void propagation(void) {
    CHECK(rote_propagator_new("tp=0", NULL, NULL) == NULL);
    CHECK(said("between 1 and 2^31 ranks"));
    const uint32_t outside[1] = {4}, second[1] = {1};
    CHECK(rote_propagator_new("tp=4", outside, NULL) == NULL);
    CHECK(said("[4] is no coordinate in the mesh tp=4"));
    rote_propagator_free(NULL);
    const double links[2] = {0.6, 87.7};
    RotePropagator *propagator = rote_propagator_new("tp=4", second, links);
    RoteAnswer answer;

    // Nothing moves: rows by a whole tensor are rows.
    CHECK(product(propagator, &rows, &replicate, &answer) == ROTE_OK);
    CHECK(answer.noutputs == 1 && answer.moved == 0 && answer.bytes == 0 && answer.shape_arg == -1);
    CHECK(answer.outputs[0].ndim == 2 && answer.outputs[0].shape[0] == 64 && answer.outputs[0].shape[1] == 128);
    CHECK(answer.outputs[0].strides[0] == 128 && answer.outputs[0].strides[1] == 1 && answer.outputs[0].dtype == 6);
    CHECK(answer.outputs[0].placements[0].kind == ROTE_SHARD && answer.outputs[0].placements[0].dim == 0);

    // The first tensor is gathered: 2 KiB of each of 4 ranks go to the 3 others.
    CHECK(product(propagator, &rows, &columns, &answer) == ROTE_OK);
    CHECK(answer.moved == 1 && answer.bytes == 3 * 64 * 32 / 4 * 4 && answer.cost_us > 0);
    CHECK(answer.inputs[0].kind == ROTE_REPLICATE && answer.inputs[1].kind == ROTE_SHARD && answer.inputs[1].dim == 1);

    // The shape that a rank gives to a view is that of its shard.
    const int64_t shape[2] = {64, 32}, strides[2] = {32, 1}, view[3] = {8, 8, 32};
    const RoteSpec tensor = {.shape = shape, .strides = strides, .placements = &rows, .ndim = 2, .dtype = 6};
    const RoteSpec tensors[2] = {tensor, tensor};
    RoteArg args[2] = {{.tag = ROTE_ARG_INPUT, .payload.i = 0}, {.tag = ROTE_ARG_INTS, .len = 3, .payload.ints = view}};
    RoteQuestion question = {.op = "aten::view", .args = args, .tensors = tensors, .nargs = 2, .ntensors = 1};
    CHECK(rote_propagate(propagator, &question, &answer) == ROTE_OK);
    CHECK(answer.shape_arg == 1 && answer.local_shape[0] == 2 && answer.local_shape[1] == 8);

    // What is wrong is named.
    FAILS(rote_propagate(NULL, &question, &answer), "the propagator is null");
    FAILS(rote_propagate(propagator, NULL, &answer), "the question is null");
    FAILS(rote_propagate(propagator, &question, NULL), "`answer` is null");
    args[0].payload.i = 1;
    FAILS(rote_propagate(propagator, &question, &answer), "expected tensor 0 next among the arguments, found 1");
    args[0].payload.i = 0;
    question.ntensors = 2;
    FAILS(rote_propagate(propagator, &question, &answer), "2 tensors, of which the arguments name 1");
    question.ntensors = 1;
    question.op = "aten::no_such_op";
    FAILS(rote_propagate(propagator, &question, &answer), "aten::no_such_op");
    args[1].payload.ints = NULL;
    question.op = "aten::view";
    FAILS(rote_propagate(propagator, &question, &answer), "a list of 3 entries is null");
    args[1].tag = 99;
    FAILS(rote_propagate(propagator, &question, &answer), "the tag 99");
    const RotePlacement unknown = {.kind = 77};
    FAILS(product(propagator, &unknown, &replicate, &answer), "77 is not a kind of placement");
    rote_propagator_free(propagator);
}

// States that shards stay shards.
static const char *stated(void *context, const char *question) {
    *(int *)context += strstr(question, "\"op\":\"my::op\"") != NULL;
    return "{\"outputs\": [\"f32[8]\"], \"strategies\": [[0, 0]], \"written\": []}";
}

static void propagation_in_json(void) {
    const char *text = rote_propagate_json(
        "{\"op\": \"aten::mm\", \"mesh\": \"tp=4\", \"args\": [\"f32[64,32] @ S(0)\", \"f32[32,128] @ S(1)\"],"
        " \"coordinate\": [3], \"why\": true}", 0, NULL, NULL);
    CHECK(text != NULL && strstr(text, "\"bytes\":6144") != NULL && strstr(text, "\"local_shape\":[64,32]") != NULL);
    CHECK(strstr(text, "\"why\":{") != NULL && strstr(text, "\"names\":[\"tp\"]") != NULL);
    int asked = 0;
    const char *own = "{\"op\": \"my::op\", \"mesh\": \"4\", \"args\": [\"f32[8] @ S(0)\"], \"own\": [\"my::op\"]}";
    text = rote_propagate_json(own, 0, stated, &asked);
    CHECK(text != NULL && asked > 0 && strstr(text, "\"placements\":[\"S(0)\"]") != NULL);

    CHECK(rote_propagate_json(own, 0, NULL, NULL) == NULL && said("my::op: no sharding rule is registered"));
    CHECK(rote_propagate_json("[", 0, NULL, NULL) == NULL && said("expected a JSON object"));
    CHECK(rote_propagate_json(NULL, 0, NULL, NULL) == NULL && said("expected a JSON object"));
    CHECK(rote_propagate_json("{\"op\": \"aten::relu\", \"mesh\": \"2\", \"args\": [\"f32[8]\"], \"coordinate\": [2]}", 0,
                              NULL, NULL) == NULL && said("expected \"coordinate\""));
    const char *partial = "{\"op\": \"aten::relu\", \"mesh\": \"2\", \"args\": [\"f32[8] @ P(sum)\"]}";
    CHECK(rote_propagate_json(partial, 0, NULL, NULL) != NULL);
    CHECK(rote_propagate_json(partial, 1, NULL, NULL) == NULL && said("expected no partial"));
}

int main(int argc, char **argv) {
    if (argc != 7) {
        return 2;
    }
    CHECK(strlen(rote_last_error()) == 0);
    CHECK(strcmp(rote_version(), ROTE_EXPECTED_VERSION) == 0);
    plans(argv[1], argv[2], argv[3]);
    sources();
    logging();
    nulls();
    nulls_in_a_session(argv[4], argv[5]);
    record(argv[6]);
    refusals(argv[1]);
    wrong_recordings(argv[1]);
    propagation();
    propagation_in_json();
    return failures != 0;
}
