// What happens to wrong calls of a framework of function pointers, and to a framework that does wrong.
//
//     c_framework PLANS
//
// PLANS: a directory for plans. The step is `y = relu(x); w += y; return relu(w)` on four numbers.

// Tensors and kernels are those of the example.

#define main train_mlp
#include "../../examples/train_mlp.c"
#undef main

static int failures = 0;
static char log_text[4096];

static void check(int holds, const char *what, int line) {
    if (!holds) {
        failures++;
        printf("line %d: %s\n  the last error is: %s\n  the log is: %s\n", line, what, rote_last_error(), log_text);
    }
}

static int said(const char *part) {
    return strstr(rote_last_error(), part) != NULL;
}

// Leaves a message behind, so that one seen later is known to be new.
static void distract(void) {
    rote_plan_check("elsewhere");
    log_text[0] = 0;
}

#include "c/check.h"

static void keep_log(int level, const char *target, const char *message) {
    (void)level, (void)target;
    strncat(log_text, message, sizeof log_text - strlen(log_text) - 1);
    strncat(log_text, "\n", sizeof log_text - strlen(log_text) - 1);
}

// ---- The framework of the example, which does wrong where a test says so ----

enum { N = 4 };
enum { RIGHT, SHAPE, DTYPE, NOTHING, FAILS_WITH_TEXT, FAILS_SILENTLY, CALLS_BACK, NO_MEMORY };
static int kernel_does = RIGHT; // what the next kernels do
static int adds_badly = RIGHT;  // the same of `add_`
static int lacks_mul = 0;       // what `has_op` says of `mul.Tensor`
static int binds = 1, reenters_in_bind = 0, numbers_fail = 0;
static Rank alone = {.storages = 1 << 20}; // no number that a test uses
static RoteSession *current = NULL;
static int ops_alive = 0, blocks_alive = 0;
static char reentry[256];

// A call of the session from one of the functions that it calls.
static void reenter(void) {
    snprintf(reentry, sizeof reentry, "%d", rote_session_stop(current, ""));
    strncat(reentry, rote_last_error(), sizeof reentry - strlen(reentry) - 1);
}

static int may_have_op(void *context, const char *name, const char *overload, int into) {
    return !(lacks_mul && find(name, overload) == MUL) && has_op(context, name, overload, into);
}

static int may_bind_op(void *context, const char *name, const char *overload, const RoteArg *args, uint32_t n,
                       uint32_t outs, int into, uint64_t *op) {
    if (reenters_in_bind) {
        reenter();
    }
    if (!binds) {
        return 7;
    }
    if (n > 1 && args[1].tag == ROTE_ARG_WRAPPED) {
        return 8; // what the `scalars` pass makes of `mul.Scalar`
    }
    if (into) {
        return ROTE_NO_INTO;
    }
    ops_alive++;
    return bind_op(context, name, overload, args, n, outs, into, op);
}

static int may_run_op(void *context, uint64_t op, Inputs tensors, Inputs into, RoteDlManagedTensor **made) {
    const int64_t usual[] = {1, N}, wide[] = {1, N + 1};
    const int does = ((const Bound *)(uintptr_t)op)->kernel == &kernels[ADD_] ? adds_badly : kernel_does;
    switch (does) {
    case SHAPE: made[0] = &tensor_new(context, 2, wide)->shared; return 0;
    case NOTHING: return 0;
    case FAILS_WITH_TEXT: made[0] = &tensor_new(context, 2, usual)->shared; return 3;
    case FAILS_SILENTLY: return 4;
    case CALLS_BACK: reenter(); break;
    default: break;
    }
    const int status = run_op(context, op, tensors, into, made);
    if (does == DTYPE) {
        made[0]->dl_tensor.dtype = (RoteDlType){0, 32, 1};
    } else if (does == NO_MEMORY) {
        made[0]->dl_tensor.data = NULL;
    }
    return status;
}

static int may_set_number(void *context, uint64_t op, uint32_t arg, int64_t element, double value) {
    return set_number(context, op, arg, element, value) + numbers_fail;
}

static void count_forgotten(void *context, uint64_t op) {
    ops_alive--;
    forget_op(context, op);
}

static int count_allocated(void *context, uint64_t bytes, uint32_t kind, int32_t index, void **place) {
    blocks_alive++;
    return allocate(context, bytes, kind, index, place);
}

static void count_released(void *context, void *place) {
    blocks_alive--;
    release(context, place);
}

static int generator(void *context, uint32_t kind, int32_t index, uint64_t *state) {
    (void)context, (void)kind, (void)index;
    *state = 0;
    return 0;
}

static const char *may_say(void *context) {
    (void)context;
    return kernel_does == FAILS_WITH_TEXT || adds_badly == FAILS_WITH_TEXT ? "the kernel is out of cheese" : NULL;
}

static RoteFramework framework(void) {
    return (RoteFramework){.size = sizeof(RoteFramework), .context = &alone, .has_op = may_have_op,
                           .bind_op = may_bind_op, .run_op = may_run_op, .set_number = may_set_number,
                           .forget_op = count_forgotten, .allocate = count_allocated, .release = count_released,
                           .is_alive = is_alive, .error = may_say};
}

// ---- The step ----

static uint64_t storages = 100;
static float x_data[N + 4], w_data[N];
static int64_t sizes[] = {1, N}, strides[] = {N, 1};

static RoteDlTensor dl(float *data) {
    return (RoteDlTensor){.data = data, .device = {1, 0}, .ndim = 2, .dtype = {2, 32, 1}, .shape = sizes,
                          .strides = strides};
}

static RoteTensor told(uint64_t storage) {
    return (RoteTensor){.storage = storage, .sizes = sizes, .strides = strides, .storage_bytes = N * sizeof(float),
                        .ndim = 2, .dtype = 6, .device_index = -1};
}

static int op_ran(const char *name, const char *overload, RoteArg *args, uint32_t n, const RoteTensor *out) {
    const RoteArg result = tensor_arg(out);
    const RoteOp op = {.name = name, .overload = overload, .args = args, .nargs = n, .outs = &result, .nouts = 1};
    return rote_record_ran(current, &op, "c_framework.c:step");
}

static RoteDlTensor x_tensor, w_tensor;
static RoteLeaf leaves[2];
static double lr = 1;
static uint64_t word = 5;

static RoteCall call(void) {
    x_tensor = dl(x_data), w_tensor = dl(w_data);
    leaves[0] = (RoteLeaf){.name = "x", .tensor = &x_tensor, .storage = 1, .bytes = N * sizeof(float)};
    leaves[1] = (RoteLeaf){.name = "w", .tensor = &w_tensor, .storage = 2, .bytes = N * sizeof(float), .state = 1};
    return (RoteCall){.leaves = leaves, .n_leaves = 2, .words = &word, .n_words = 1, .numbers = &lr, .n_numbers = 1};
}

static RoteSession *session(const char *plans) {
    RoteFramework table = framework();
    current = rote_session_for(&table, "c_framework.c:step", "two ops 1", 1, 0, plans, 8, NULL);
    CHECK(current != NULL);
    CHECK(rote_session_fact(current, ROTE_GUARD_MODE, "mode", 0) == ROTE_OK);
    CHECK(rote_session_fact(current, ROTE_GUARD_HOST, "lr", 1) == ROTE_OK);
    return current;
}

static int has(const char *text, const char *part) {
    return text != NULL && strstr(text, part) != NULL;
}

// Records a call as the step would tell of it; what came of it.
static const char *record_step(void) {
    const RoteTensor x = told(1), w = told(2), y = told(++storages), z = told(++storages);
    RoteArg relu[] = {tensor_arg(&x)}, add[] = {tensor_arg(&w), tensor_arg(&y), {.tag = ROTE_ARG_FLOAT}}, last[] = {tensor_arg(&w)};
    add[0].written = 1, add[2].payload.f = lr;
    uint32_t followed;
    CHECK(rote_record_call(current) == ROTE_OK);
    CHECK(rote_record_float(current, ROTE_FLOAT_READ, 0, 0, lr, "lr", &followed) == ROTE_OK);
    CHECK(rote_record_ready(current) == ROTE_OK);
    CHECK(op_ran("aten::relu", "", relu, 1, &y) == ROTE_OK);
    CHECK(op_ran("aten::add_", "Tensor", add, 3, &w) == ROTE_OK);
    CHECK(op_ran("aten::relu", "", last, 1, &z) == ROTE_OK);
    CHECK(rote_record_returned(current, "z", &z, ROTE_NO_INDEX) == ROTE_OK);
    return rote_record_finish(current, "{\"t\": 0}");
}

static void asks_to_record(void) {
    RoteCall made = call();
    RoteResults results;
    CHECK(rote_session_step(current, &made, &results) == ROTE_RECORD);
}

// Begins a session and a recording.
static void begin(const char *plans) {
    session(plans);
    asks_to_record();
    CHECK(rote_record_call(current) == ROTE_OK);
}

static void recorded_twice(void) {
    lr = 1;
    asks_to_record();
    CHECK(has(record_step(), "candidate"));
    lr = 2;
    asks_to_record();
    CHECK(has(record_step(), "kept"));
}

static void replays(void) {
    RoteCall made = call();
    RoteResults results;
    const float before = w_data[0];
    CHECK(rote_session_step(current, &made, &results) == ROTE_REPLAYED);
    CHECK(results.n == 1);
    CHECK(w_data[0] == before + (float)lr * (x_data[0] > 0 ? x_data[0] : 0));
    CHECK(((float *)results.tensors[0]->dl_tensor.data)[0] == w_data[0]);
    results.tensors[0]->deleter(results.tensors[0]);
}

// ---- Wrong calls ----

static void tables(const char *plans) {
    RoteFramework table = framework();
#define MAKE(t) rote_session_for(&(t), "f", "two ops 1", 1, 0, plans, 8, NULL)
    GIVES_NULL(rote_session_for(NULL, "f", "two ops 1", 1, 0, plans, 8, NULL), "`framework` is null");
    table.size = sizeof table - 8;
    GIVES_NULL(MAKE(table), "the framework's table has");
    table.size = 0;
    GIVES_NULL(MAKE(table), "the framework's table has 0 bytes");
#define WITHOUT(member)                                                      \
    do {                                                                     \
        table = framework();                                                 \
        table.member = NULL;                                                 \
        GIVES_NULL(MAKE(table), "the framework's `" #member "` is null");    \
    } while (0)
    WITHOUT(has_op);
    WITHOUT(bind_op);
    WITHOUT(run_op);
    WITHOUT(set_number);
    WITHOUT(allocate);
    WITHOUT(release);
    WITHOUT(is_alive);
    table = framework(), table.alignment = 48;
    GIVES_NULL(MAKE(table), "the framework's `alignment` is 48");
    table = framework(), table.generator = generator;
    GIVES_NULL(MAKE(table), "`keep_generator` is null");
    table = framework(), table.bind_collective = bind_collective;
    GIVES_NULL(MAKE(table), "`start` is null");
    table = framework(), table.gather = gather;
    GIVES_NULL(MAKE(table), "`ranks` is null");
    table = framework();
    GIVES_NULL(rote_session_for(&table, "f", "two ops 1", 2, 2, plans, 8, NULL), "rank 2 is not below");
    GIVES_NULL(rote_session_for(&table, "f", "two ops 1", 1, 0, plans, 8, "swiftly"), "swiftly");
    GIVES_NULL(rote_session_for(&table, "\xff", "two ops 1", 1, 0, plans, 8, NULL), "UTF-8");
    CHECK(rote_abi_version() == ROTE_ABI_VERSION);
}

static void *elsewhere(void *nothing) {
    (void)nothing;
    RoteCall made = call();
    RoteResults results;
    const char *other = "belongs to another thread";
    FAILS(rote_session_step(current, &made, &results), other);
    FAILS(rote_session_fact(current, ROTE_GUARD_HOST, "late", 1), other);
    GIVES_NULL(rote_session_stats(current), other);
    FAILS(rote_session_free(current), other);
    return NULL;
}

static void handles(const char *plans) {
    pthread_t thread;
    RoteCall made = call();
    RoteResults results;
    session(plans);
    pthread_create(&thread, NULL, elsewhere, NULL);
    pthread_join(thread, NULL);

    FAILS(rote_session_step(current, NULL, &results), "`call` is null");
    FAILS(rote_session_step(current, &made, NULL), "`results` is null");
    FAILS(rote_session_step_again(current, NULL), "`results` is null");
    FAILS(rote_record_ran(current, NULL, ""), "`op` is null");
    FAILS(rote_record_returned(current, "z", NULL, ROTE_NO_INDEX), "the tensor z is null");
    const RoteTensor x = told(1);
    FAILS(rote_record_returned(current, "z", &x, ROTE_NO_INDEX), "no recording");
    FAILS(rote_record_gradient(current, "w", &x, ROTE_NO_INDEX), "no recording");
    GIVES_NULL(rote_record_finish(current, "{\"t\": 0}"), "recording");
    FAILS(rote_session_fact(current, 9, "kind", 0), "9 is not a kind of guard");
    FAILS(rote_session_fact(current, 0, "lr", 0), "a fact named lr is declared already");

    made.n_leaves = 3, made.leaves = NULL;
    FAILS(rote_session_step(current, &made, &results), "a list of 3 entries is null");
    made = call();
    CHECK(rote_session_step(current, &made, &results) == ROTE_RECORD);
    FAILS(rote_session_fact(current, ROTE_GUARD_HOST, "late", 1), "late is declared after a call was made");

    RoteSession *freed = current;
    CHECK(rote_session_free(freed) == ROTE_OK);
    FAILS(rote_session_free(freed), "the session was freed");
    FAILS(rote_session_step(freed, &made, &results), "the session was freed");
    FAILS(rote_record_call(freed), "the session was freed");
    FAILS(rote_session_step(NULL, &made, &results), "the session is null");
}

// A call that cannot be looked at is answered with an error, and the next good one is handled.
#define WRONG_CALL(change, message)                                                       \
    do {                                                                              \
        session(plans);                                                               \
        RoteCall made = call();                                                       \
        RoteResults results;                                                          \
        change;                                                                       \
        FAILS(rote_session_step(current, &made, &results), message);                  \
        FAILS(rote_record_call(current), "no call is handled");                       \
        made = call();                                                                \
        sizes[0] = 1;                                                                 \
        CHECK(rote_session_step(current, &made, &results) == ROTE_RECORD);            \
        CHECK(rote_session_free(current) == ROTE_OK);                                 \
    } while (0)

static void leaves_and_facts(const char *plans) {
    WRONG_CALL((x_tensor.dtype = (RoteDlType){9, 32, 1}), "x (leaf 0) has the element type 9, 32 bits");
    WRONG_CALL((x_tensor.dtype = (RoteDlType){2, 32, 4}), "x (leaf 0) has the element type 2, 32 bits, 4 lanes");
    WRONG_CALL(x_tensor.device.device_type = 99, "x (leaf 0) is on device type 99");
    WRONG_CALL(x_tensor.ndim = -1, "x (leaf 0) has -1 dims");
    WRONG_CALL(x_tensor.shape = NULL, "x (leaf 0) has no shape");
    WRONG_CALL(x_tensor.byte_offset = 1, "x (leaf 0) does not begin at a multiple of 4");
    WRONG_CALL(leaves[0].bytes = 8, "x (leaf 0) reaches bytes 0 to 16 of a storage of 8");
    WRONG_CALL(leaves[0].start = 4, "x (leaf 0) reaches bytes 4 to 20 of a storage of 16");
    WRONG_CALL(sizes[0] = -1, "x (leaf 0) ");
    WRONG_CALL(w_tensor.data = x_data + 2, "w (leaf 1) overlaps with another tensor that names another storage");
    WRONG_CALL(leaves[1].storage = leaves[0].storage, "w (leaf 1) names the storage of leaf 0, which lies in other memory");
    WRONG_CALL((leaves[0].storage = 0, leaves[1].storage = 0, w_tensor.data = x_data + 2), "w (leaf 1) overlaps");
    WRONG_CALL((leaves[1].name = NULL, w_tensor.ndim = -1), "args[1] (leaf 1) has -1 dims");
    WRONG_CALL(made.n_words = 0, "the call passes 0 words, expected 1");
    WRONG_CALL((made.n_numbers = 0, made.numbers = NULL), "the call passes 0 numbers, expected 1");
}

static void recordings(const char *plans) {
    begin(plans);
    RoteCall made = call();
    RoteResults results;
    uint32_t index;
    RoteTensor x = told(1), beyond = told(3), y = told(++storages), stranger = told(77);
    RoteArg args[] = {tensor_arg(&x)};
    beyond.offset = 1;
    FAILS(rote_record_float(current, 2, 5, 0, -1, NULL, &index), "float 5 is not followed");
    int bound;
    FAILS(rote_record_trust(current, &index, &bound), "not ready");
    FAILS(op_ran("aten::relu", "", args, 1, &y), "not ready");
    FAILS(rote_record_returned(current, "z", &x, ROTE_NO_INDEX), "not ready");
    CHECK(rote_record_ready(current) == ROTE_OK);
    FAILS(op_ran("", "", args, 1, &y), "no name");
    FAILS(rote_record_returned(current, "z", &x, 7), "no spec has the number 7");
    FAILS(rote_record_gradient(current, "nobody", &x, ROTE_NO_INDEX), "no leaf has the name nobody");
    GIVES_NULL(rote_record_finish(current, "{t: 0"), "is not JSON");
    FAILS(op_ran("aten::relu", "", args, 1, &beyond), "bytes 4 to 20 of a storage of 16");
    args[0].payload.tensors = NULL;
    FAILS(op_ran("aten::relu", "", args, 1, &y), "argument 0 is null");
    // A plan without an op that was told wrongly would be another step.
    args[0] = tensor_arg(&x);
    CHECK(op_ran("aten::relu", "", args, 1, &y) == ROTE_REFUSED);
    CHECK(said("reported an op wrongly") && said("no name") && said("remedy"));
    CHECK(rote_record_abort(current) == ROTE_OK);
    CHECK(rote_session_free(current) == ROTE_OK);

    // So would one without a write.
    begin(plans);
    CHECK(rote_record_ready(current) == ROTE_OK);
    FAILS(op_ran("aten::relu_", "", args, 1, &x), "aten::relu_ writes its first argument");
    x.ndim = UINT32_MAX;
    FAILS(op_ran("aten::relu", "", args, 1, &y), "dims, expected 0 to 64");
    x = told(1);
    CHECK(has(rote_record_finish(current, "{\"t\": 0}"), "refused"));
    CHECK(rote_session_free(current) == ROTE_OK);

    begin(plans);
    CHECK(rote_record_ready(current) == ROTE_OK);
    args[0] = tensor_arg(&stranger);
    CHECK(op_ran("aten::relu", "", args, 1, &y) == ROTE_REFUSED);
    CHECK(said("aten::relu") && said("argument 0") && said("remedy"));
    FAILS(rote_record_returned(current, "z", NULL, ROTE_NO_INDEX), "the tensor z is null");
    CHECK(has(rote_record_finish(current, "{\"t\": 0}"), "refused"));
    CHECK(rote_session_step(current, &made, &results) == ROTE_EAGER); // refused before
    CHECK(rote_session_free(current) == ROTE_OK);

    // An op of ATen that writes where no argument lies would be left out.
    begin(plans);
    const RoteTensor z = told(++storages);
    FAILS(rote_record_float(current, ROTE_FLOAT_READ, 0, 0, lr + 1, "lr", &(uint32_t){0}), "in this call, not");
    CHECK(rote_record_ready(current) == ROTE_OK);
    args[0] = tensor_arg(&x);
    CHECK(op_ran("aten::relu", "", args, 1, &z) == ROTE_OK);
    CHECK(op_ran("aten::relu", "", args, 1, &z) == ROTE_REFUSED);
    CHECK(said("in memory that is none of its arguments'") && said("remedy"));
    CHECK(has(rote_record_finish(current, "{\"t\": 0}"), "refused"));
    FAILS(rote_session_step_again(current, &results), "has bound no plan for the last call");
    CHECK(rote_session_free(current) == ROTE_OK);

    // Names tell leaves apart.
    session(plans);
    leaves[1].name = leaves[0].name;
    CHECK(rote_session_step(current, &made, &results) == ROTE_RECORD);
    FAILS(rote_record_call(current), "two leaves are named x");
    made = call();
    CHECK(rote_session_free(current) == ROTE_OK);

    // A spec that is none ends the recording.
    session(plans);
    leaves[1].spec = "S(0)";
    CHECK(rote_session_step(current, &made, &results) == ROTE_RECORD);
    FAILS(rote_record_call(current), "is not a spec");
    FAILS(op_ran("aten::relu", "", args, 1, &y), "no recording");
    CHECK(rote_session_free(current) == ROTE_OK);
}

// ---- A framework that does wrong ----

// What a kernel does before anything was written is undone: the call runs eagerly, and the log says why.
#define UNDONE(what, message)                                                 \
    do {                                                                      \
        RoteCall made = call();                                               \
        RoteResults results;                                                  \
        distract();                                                           \
        kernel_does = (what);                                                 \
        CHECK(rote_session_step(current, &made, &results) == ROTE_EAGER);     \
        CHECK(results.n == 0);                                                \
        kernel_does = RIGHT;                                                  \
        check(has(log_text, message), "the log says: " message, __LINE__);    \
        replays();                                                            \
    } while (0)

// What fails after the weight was written is an error.
#define LASTING(what, message)                                                 \
    do {                                                                       \
        RoteCall made = call();                                                \
        RoteResults results;                                                   \
        adds_badly = (what);                                                   \
        FAILS(rote_session_step(current, &made, &results), message);           \
        adds_badly = RIGHT;                                                    \
        replays();                                                             \
    } while (0)

static void wrong_kernels(const char *plans) {
    session(plans);
    recorded_twice();
    replays();
    replays();
    UNDONE(SHAPE, "aten::relu: result 0 is f32 [1, 5] with strides [5, 1] on cpu, the plan has f32 [1, 4] with strides [4, 1] on cpu");
    UNDONE(DTYPE, "aten::relu: result 0 is i32");
    UNDONE(NOTHING, "aten::relu: result 0 is null");
    UNDONE(FAILS_WITH_TEXT, "aten::relu: the kernel is out of cheese");
    UNDONE(FAILS_SILENTLY, "aten::relu returned 4");
    UNDONE(NO_MEMORY, "aten::relu: result 0 has no memory");
    LASTING(FAILS_WITH_TEXT, "aten::add_: the kernel is out of cheese");
    LASTING(FAILS_SILENTLY, "aten::add_ returned 4");

    kernel_does = CALLS_BACK;
    replays();
    kernel_does = RIGHT;
    CHECK(has(reentry, "-1the session is in use"));

    RoteCall made = call();
    RoteResults results;
    numbers_fail = 6;
    lr = 0.25;
    FAILS(rote_session_step(current, &made, &results), "set_number returned 6");
    numbers_fail = 0;
    replays();
    lr = 0.5;
    replays();

    // A result outlives its session.
    CHECK(rote_session_step(current, &made, &results) == ROTE_REPLAYED);
    RoteDlManagedTensor *kept = results.tensors[0];
    CHECK(rote_session_free(current) == ROTE_OK);
    CHECK(((float *)kept->dl_tensor.data)[0] == w_data[0]);
    kept->deleter(kept);
}

static void binding(const char *plans) {
    char elsewhere[4096];
    snprintf(elsewhere, sizeof elsewhere, "%s/binding", plans);
    session(elsewhere);
    lr = 1;
    asks_to_record();
    CHECK(has(record_step(), "candidate"));
    lr = 2;
    asks_to_record();
    binds = 0, reenters_in_bind = 1;
    const char *outcome = record_step();
    CHECK(has(outcome, "refused") && has(outcome, "aten::relu") && has(outcome, "returned 7"));
    binds = 1, reenters_in_bind = 0;
    CHECK(has(reentry, "-1the session is in use"));
    CHECK(rote_session_free(current) == ROTE_OK);
}

// A pass makes `mul.Tensor` of `mul.Scalar`. Where the framework says that it has no such op, the pass lets the op be.
// Where it says that it has the op and does not bind it, the plan is bound as it was recorded.
static void passes(const char *plans, int says_so) {
    RoteCall made = call();
    RoteResults results;
    char own[512];
    snprintf(own, sizeof own, "%s/%s", plans, says_so ? "without_mul" : "with_mul");
    lacks_mul = says_so;
    session(own);
    for (int i = 0; i < 2; i++) {
        const RoteTensor x = told(1), y = told(++storages);
        RoteArg args[] = {tensor_arg(&x), {.tag = ROTE_ARG_FLOAT, .payload.f = 3}};
        CHECK(rote_session_step(current, &made, &results) == ROTE_RECORD);
        CHECK(rote_record_call(current) == ROTE_OK);
        CHECK(rote_record_ready(current) == ROTE_OK);
        CHECK(op_ran("aten::mul", "Scalar", args, 2, &y) == ROTE_OK);
        CHECK(rote_record_returned(current, "y", &y, ROTE_NO_INDEX) == ROTE_OK);
        distract();
        CHECK(has(rote_record_finish(current, "{\"t\": 0}"), i == 0 ? "candidate" : "kept"));
    }
    CHECK(has(log_text, "is bound without passes") == !says_so);
    CHECK(has(log_text, "bind_op of aten::mul returned 8") == !says_so);
    CHECK(rote_session_step(current, &made, &results) == ROTE_REPLAYED);
    CHECK(((float *)results.tensors[0]->dl_tensor.data)[0] == 3 * x_data[0]);
    results.tensors[0]->deleter(results.tensors[0]);
    CHECK(rote_session_free(current) == ROTE_OK);
}

static int answer(const RoteCall *made) {
    RoteResults results;
    const int status = rote_session_step(current, made, &results);
    if (status == ROTE_REPLAYED) {
        results.tensors[0]->deleter(results.tensors[0]);
    }
    CHECK(rote_session_notice(current) == NULL);
    return status;
}

// A plan is replayed for what it was recorded for, and for nothing else.
static void guards(const char *plans) {
    static float moved[N];
    char folder[4096];
    snprintf(folder, sizeof folder, "%s/guards", plans);
    session(folder);
    recorded_twice();
    replays();
    RoteCall made = call();
    word = 6;
    CHECK(answer(&made) == ROTE_RECORD);
    word = 5;
    CHECK(answer(&made) == ROTE_REPLAYED);
    leaves[0].storage = 33; // another batch
    CHECK(answer(&made) == ROTE_REPLAYED);
    leaves[0].name = "z"; // another name, another leaf
    CHECK(answer(&made) == ROTE_RECORD);
    made = call();
    leaves[0].storage = 2, x_tensor.data = w_data; // the batch is the weight
    CHECK(answer(&made) == ROTE_RECORD);
    made = call();
    leaves[0].state = 1;
    CHECK(answer(&made) == ROTE_RECORD);
    made = call();
    made.n_leaves = 1;
    CHECK(answer(&made) == ROTE_RECORD);
    made = call();
    w_tensor.data = moved, leaves[1].storage = 44;
    CHECK(answer(&made) == ROTE_RECORD);
    x_tensor.data = w_data, leaves[0].storage = 45; // the batch lies where the weight was
    CHECK(answer(&made) == ROTE_RECORD);
    made = call();
    CHECK(answer(&made) == ROTE_REPLAYED);
    CHECK(rote_session_free(current) == ROTE_OK);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        return 2;
    }
    for (int i = 0; i < N; i++) {
        x_data[i] = (float)i + 0.5F;
    }
    CHECK(rote_set_log(keep_log) == ROTE_OK);
    tables(argv[1]);
    handles(argv[1]);
    leaves_and_facts(argv[1]);
    recordings(argv[1]);
    wrong_kernels(argv[1]);
    binding(argv[1]);
    passes(argv[1], 0);
    passes(argv[1], 1);
    guards(argv[1]);
    CHECK(alone.held == NULL);
    CHECK(ops_alive == 0);
    CHECK(blocks_alive == 0);
    return failures != 0;
}
