// Trains a sharded two-layer network through Rote's C ABI: no Python, no PyTorch.
//
//     cc -std=c11 -I ffi/include examples/train_mlp.c -o train_mlp target/release/librote.so -lpthread
//     LD_LIBRARY_PATH=target/release ./train_mlp PLANS [trust]
//
// PLANS is the directory of plan files. The first run records its step and writes a plan for each rank; the next run
// opens these plans. With `trust` it replays them at its first call, else after it has recorded the step once.
//
// Four ranks, which are threads of this process, hold a part of each weight: the first is split by columns, the second
// by rows. One all-reduce sums the output, another one the gradient of the batch. Each rank trains two equal models,
// one by running every op, one through a session of Rote, and compares them bit for bit.
//
// The file has four parts: a toy framework of tensors and kernels, the table of functions that it gives to Rote, the
// step, which is written once for running and recording, and the training loop.

#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <pthread.h>
#include <rote.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 4, INPUT = 32, HIDDEN = 64, SHARD = HIDDEN / RANKS, OUTPUT = 16, BATCH = 24, STEPS = 12, TIMED = 300 };

// ---- The framework: tensors, kernels, collectives ----

typedef struct Rank Rank;

// Memory that tensors share.
typedef struct Storage {
    Rank *rank;
    uint64_t number; // never used twice on a rank
    int64_t references;
    uint64_t bytes;
    float *data;
    struct Storage *before, *after; // in the list of what a rank holds
} Storage;

// A tensor of f32 with two dims or none. DLPack's struct comes first, so that Rote can be given the tensor.
typedef struct {
    RoteDlManagedTensor shared;
    int64_t sizes[2], strides[2];
    Storage *storage;
} Tensor;

typedef const RoteDlTensor *const *Inputs;

// An op. Its arguments are tensors, then one of another kind, if any.
typedef struct {
    const char *name, *overload;
    uint32_t tensors;
    uint8_t last; // tag of the last argument, if it is no tensor
    enum { SAME, PRODUCT, NUMBER, IN_PLACE } shape; // of the result: of the first tensor, or another one
    void (*run)(Inputs in, float number, const RoteDlTensor *out);
} Kernel;

// An op with its arguments, as a plan calls it.
typedef struct {
    const Kernel *kernel;
    int64_t places[2]; // of the tensors, in what a run is given
    double number;
} Bound;

// A collective of a plan or of the step.
typedef struct Collective {
    uint64_t turn;
    RoteDlTensor output;
} Collective;

// What ranks tell each other at one turn: each puts its bytes here, and takes those of all.
typedef struct {
    uint8_t *bytes[RANKS];
    int arrived, taken;
} Exchange;

enum { OPEN = 64 }; // turns that may be under way at once
static Exchange exchanges[OPEN];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

struct Rank {
    uint32_t index;
    const char *plans;
    int trusts;
    uint64_t storages;   // made so far
    uint64_t turns;      // begun so far
    Storage *held;       // the list of storages
    RoteSession *session;
    int recording;
    char error[128];
    int recorded, replayed, opened;
};

static void stop(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void *memory(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (memory == NULL) {
        stop("memory", "there is no more");
    }
    return memset(memory, 0, bytes);
}

static void delete(RoteDlManagedTensor *shared) {
    Tensor *tensor = (Tensor *)shared;
    Storage *storage = tensor->storage;
    if (--storage->references == 0) {
        *(storage->before ? &storage->before->after : &storage->rank->held) = storage->after;
        if (storage->after) {
            storage->after->before = storage->before;
        }
        free(storage->data);
        free(storage);
    }
    free(tensor);
}

static Tensor *tensor_in(Storage *storage, int32_t dims, const int64_t *sizes, const int64_t *strides) {
    Tensor *tensor = memory(sizeof(Tensor));
    memcpy(tensor->sizes, sizes, 2 * sizeof(int64_t));
    memcpy(tensor->strides, strides, 2 * sizeof(int64_t));
    tensor->storage = storage;
    storage->references++;
    tensor->shared.deleter = delete;
    tensor->shared.dl_tensor = (RoteDlTensor){
        .data = storage->data, .device = {1, 0}, .ndim = dims, .dtype = {2, 32, 1},
        .shape = tensor->sizes, .strides = tensor->strides};
    return tensor;
}

static Tensor *tensor_new(Rank *rank, int32_t dims, const int64_t *sizes) {
    Storage *storage = memory(sizeof(Storage));
    storage->rank = rank;
    storage->number = ++rank->storages;
    storage->bytes = (dims == 0 ? 1 : (uint64_t)(sizes[0] * sizes[1])) * sizeof(float);
    storage->data = memory(storage->bytes);
    storage->after = rank->held;
    if (rank->held) {
        rank->held->before = storage;
    }
    rank->held = storage;
    int64_t strides[2] = {sizes[1], 1};
    return tensor_in(storage, dims, sizes, strides);
}

static int64_t rows(const RoteDlTensor *t) { return t->ndim == 0 ? 1 : t->shape[0]; }
static int64_t columns(const RoteDlTensor *t) { return t->ndim == 0 ? 1 : t->shape[1]; }

static float *at(const RoteDlTensor *t, int64_t row, int64_t column) {
    float *data = (float *)((char *)t->data + t->byte_offset);
    if (t->ndim == 0) {
        return data;
    }
    return data + (t->strides ? row * t->strides[0] + column * t->strides[1] : row * t->shape[1] + column);
}

static void multiply_matrices(Inputs in, float number, const RoteDlTensor *out) {
    (void)number;
    for (int64_t i = 0; i < rows(out); i++) {
        for (int64_t j = 0; j < columns(out); j++) {
            float sum = 0;
            for (int64_t k = 0; k < columns(in[0]); k++) {
                sum += *at(in[0], i, k) * *at(in[1], k, j);
            }
            *at(out, i, j) = sum;
        }
    }
}
static void sum(Inputs in, float number, const RoteDlTensor *out) {
    (void)number;
    float sum = 0;
    for (int64_t i = 0; i < rows(in[0]); i++) {
        for (int64_t j = 0; j < columns(in[0]); j++) {
            sum += *at(in[0], i, j);
        }
    }
    *at(out, 0, 0) = sum;
}

// A kernel that computes each element from those at the same place of two tensors, `a` and `b`, or of one.
#define ELEMENTS(name, two, value)                                             \
    static void name(Inputs in, float number, const RoteDlTensor *out) {       \
        (void)number;                                                          \
        for (int64_t i = 0; i < rows(out); i++) {                              \
            for (int64_t j = 0; j < columns(out); j++) {                       \
                const float a = *at(in[0], i, j), b = *at(in[two], i, j);      \
                (void)b;                                                       \
                *at(out, i, j) = (value);                                      \
            }                                                                  \
        }                                                                      \
    }
ELEMENTS(relu, 0, a > 0 ? a : 0)
ELEMENTS(relu_backward, 1, b > number ? a : 0)
ELEMENTS(subtract, 1, a - number * b)
ELEMENTS(multiply, 1, a * b)
ELEMENTS(scale, 0, a * number)
ELEMENTS(add, 1, a + number * b)

enum { MM, RELU, THRESHOLD_BACKWARD, SUB, MUL, MUL_SCALAR, SUM, ADD_, KERNELS };
static const Kernel kernels[KERNELS] = {
    [MM] = {"aten::mm", "", 2, ROTE_ARG_NONE, PRODUCT, multiply_matrices},
    [RELU] = {"aten::relu", "", 1, ROTE_ARG_NONE, SAME, relu},
    [THRESHOLD_BACKWARD] = {"aten::threshold_backward", "", 2, ROTE_ARG_FLOAT, SAME, relu_backward},
    [SUB] = {"aten::sub", "Tensor", 2, ROTE_ARG_INT, SAME, subtract},
    [MUL] = {"aten::mul", "Tensor", 2, ROTE_ARG_NONE, SAME, multiply},
    [MUL_SCALAR] = {"aten::mul", "Scalar", 1, ROTE_ARG_FLOAT, SAME, scale},
    [SUM] = {"aten::sum", "", 1, ROTE_ARG_NONE, NUMBER, sum},
    [ADD_] = {"aten::add_", "Tensor", 2, ROTE_ARG_FLOAT, IN_PLACE, add},
};

// Runs a kernel into its first tensor, into a given one, or into a new one, which comes back.
static Tensor *compute(Rank *rank, const Kernel *kernel, Inputs in, double number, const RoteDlTensor *into) {
    Tensor *made = NULL;
    if (kernel->shape == IN_PLACE) {
        into = in[0];
    } else if (into == NULL) {
        const int64_t sizes[2] = {rows(in[0]), columns(in[kernel->shape == PRODUCT])}, one[2] = {1, 1};
        made = tensor_new(rank, kernel->shape == NUMBER ? 0 : in[0]->ndim, kernel->shape == NUMBER ? one : sizes);
        into = &made->shared.dl_tensor;
    }
    kernel->run(in, (float)number, into);
    return made;
}

// Begins a turn: the other ranks can see the bytes of this one. All ranks make their turns in one order.
static uint64_t put(Rank *rank, const void *bytes, size_t n) {
    const uint64_t turn = rank->turns++;
    Exchange *exchange = &exchanges[turn % OPEN];
    uint8_t *copy = memory(n);
    memcpy(copy, bytes, n);
    pthread_mutex_lock(&lock);
    while (exchange->bytes[rank->index] != NULL) { // of an earlier turn
        pthread_cond_wait(&changed, &lock);
    }
    exchange->bytes[rank->index] = copy;
    exchange->arrived++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return turn;
}

// Waits until every rank has begun a turn.
static Exchange *take(uint64_t turn) {
    Exchange *exchange = &exchanges[turn % OPEN];
    pthread_mutex_lock(&lock);
    while (exchange->arrived < RANKS) {
        pthread_cond_wait(&changed, &lock);
    }
    pthread_mutex_unlock(&lock);
    return exchange;
}

// Ends a turn on this rank. The last rank clears the exchange.
static void leave(Exchange *exchange) {
    pthread_mutex_lock(&lock);
    if (++exchange->taken == RANKS) {
        for (int i = 0; i < RANKS; i++) {
            free(exchange->bytes[i]);
        }
        *exchange = (Exchange){0};
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
}

static void all_reduce_start(Rank *rank, Collective *work, const RoteDlTensor *in, const RoteDlTensor *out) {
    const int64_t n = rows(in) * columns(in);
    work->output = *out; // contiguous, as `in` is: Rote keeps the strides that were recorded
    work->turn = put(rank, at(in, 0, 0), (size_t)n * sizeof(float));
}

// Sums in the order of ranks, so that every run gives the same bits.
static void all_reduce_wait(const Collective *work) {
    const int64_t n = rows(&work->output) * columns(&work->output);
    float *out = at(&work->output, 0, 0);
    Exchange *exchange = take(work->turn);
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int rank = 0; rank < RANKS; rank++) {
            sum += ((const float *)exchange->bytes[rank])[i];
        }
        out[i] = sum;
    }
    leave(exchange);
}

// ---- What Rote is given ----

static int failed(Rank *rank, const char *what, const char *name, const char *overload) {
    snprintf(rank->error, sizeof rank->error, "%s %s.%s", what, name, overload);
    return 2;
}

static double number_of(const RoteArg *arg) {
    switch (arg->tag) {
    case ROTE_ARG_INT: return (double)arg->payload.i;
    case ROTE_ARG_FLOAT: return arg->payload.f;
    case ROTE_ARG_WRAPPED: return number_of(arg->payload.list);
    default: return 0;
    }
}

static int find(const char *name, const char *overload) {
    for (int i = 0; i < KERNELS; i++) {
        if (strcmp(kernels[i].name, name) == 0 && strcmp(kernels[i].overload, overload) == 0) {
            return i;
        }
    }
    return KERNELS;
}

static int has_op(void *context, const char *name, const char *overload, int into) {
    (void)context;
    const int kernel = find(name, overload);
    return kernel != KERNELS && !(into && kernel == SUM);
}

static int bind_op(void *context, const char *name, const char *overload, const RoteArg *args, uint32_t n,
                   uint32_t outs, int into, uint64_t *op) {
    int found = find(name, overload);
    if (found == MUL && n == 2 && args[1].tag == ROTE_ARG_WRAPPED) {
        found = MUL_SCALAR; // a pass makes `mul.Tensor` of `mul.Scalar`
    }
    const Kernel *kernel = &kernels[found];
    if (found == KERNELS || outs != 1 || n < kernel->tensors) {
        return failed(context, "this framework has no", name, overload);
    }
    if (into && found == SUM) {
        return ROTE_NO_INTO; // `has_op` says so, too
    }
    Bound *bound = memory(sizeof(Bound));
    bound->kernel = kernel;
    for (uint32_t i = 0; i < kernel->tensors; i++) {
        if (args[i].tag != ROTE_ARG_INPUT) {
            free(bound);
            return failed(context, "an argument is no tensor:", name, overload);
        }
        bound->places[i] = args[i].payload.i;
    }
    bound->number = n > kernel->tensors ? number_of(&args[kernel->tensors]) : 0;
    *op = (uint64_t)(uintptr_t)bound;
    return 0;
}

static int run_op(void *context, uint64_t op, Inputs tensors, Inputs into, RoteDlManagedTensor **made) {
    const Bound *bound = (const Bound *)(uintptr_t)op;
    const Kernel *kernel = bound->kernel;
    const RoteDlTensor *in[2] = {tensors[bound->places[0]], tensors[bound->places[kernel->tensors - 1]]};
    Tensor *result = compute(context, kernel, in, bound->number, into ? into[0] : NULL);
    made[0] = result ? &result->shared : NULL;
    return 0;
}

static int set_number(void *context, uint64_t op, uint32_t arg, int64_t element, double value) {
    Bound *bound = (Bound *)(uintptr_t)op;
    if (arg != bound->kernel->tensors || element != -1) {
        return failed(context, "another number changes:", bound->kernel->name, bound->kernel->overload);
    }
    bound->number = value;
    return 0;
}

static void forget_op(void *context, uint64_t op) {
    (void)context;
    free((void *)(uintptr_t)op);
}

static int allocate(void *context, uint64_t bytes, uint32_t device_kind, int32_t device_index, void **place) {
    (void)context, (void)device_kind, (void)device_index;
    *place = memory(bytes);
    return 0;
}

static void release(void *context, void *place) {
    (void)context;
    free(place);
}

static int is_alive(void *context, uint64_t number) {
    for (const Storage *storage = ((Rank *)context)->held; storage; storage = storage->after) {
        if (storage->number == number) {
            return 1;
        }
    }
    return 0;
}

static int bind_collective(void *context, const RoteCollective *described, uint64_t *collective) {
    Rank *rank = context;
    if (described->kind != ROTE_ALL_REDUCE || described->reduce != ROTE_SUM || strcmp(described->group, "0") != 0) {
        return failed(rank, "this framework only sums over all ranks, not over", described->group, "");
    }
    *collective = (uint64_t)(uintptr_t)memory(sizeof(Collective));
    return 0;
}

static void forget_collective(void *context, uint64_t collective) {
    (void)context;
    free((Collective *)(uintptr_t)collective);
}

static int start(void *context, uint64_t collective, const RoteDlTensor *input, const RoteDlTensor *output) {
    all_reduce_start(context, (Collective *)(uintptr_t)collective, input, output);
    return 0;
}

static int wait(void *context, uint64_t collective) {
    (void)context;
    all_reduce_wait((const Collective *)(uintptr_t)collective);
    return 0;
}

static int gather(void *context, const char *group, const uint8_t *ours, uint64_t n, uint8_t *all) {
    (void)group;
    Exchange *exchange = take(put(context, ours, n));
    for (int i = 0; i < RANKS; i++) {
        memcpy(all + (uint64_t)i * n, exchange->bytes[i], n);
    }
    leave(exchange);
    return 0;
}

static uint32_t ranks(void *context, const char *group) {
    (void)context;
    return strcmp(group, "0") == 0 ? RANKS : 0;
}

static const char *error(void *context) {
    return ((Rank *)context)->error;
}

// ---- The step: runs op by op, and tells a recording of each ----

static void checked(int status, const char *what) {
    if (status != ROTE_OK) {
        stop(what, rote_last_error());
    }
}

static RoteTensor described(const Tensor *tensor) {
    const RoteDlTensor *dl = &tensor->shared.dl_tensor;
    return (RoteTensor){
        .storage = tensor->storage->number, .sizes = tensor->sizes, .strides = tensor->strides,
        .storage_bytes = tensor->storage->bytes, .ndim = (uint32_t)dl->ndim, .dtype = 6, .device_index = -1};
}

static RoteArg tensor_arg(const RoteTensor *tensor) {
    return (RoteArg){.tag = ROTE_ARG_TENSOR, .len = 1, .payload.tensors = tensor};
}

static RoteArg text_arg(const char *text) {
    return (RoteArg){.tag = ROTE_ARG_STR, .payload.s = text};
}

// Tells the recording, if there is one, of an op that has run.
static void ran(Rank *rank, int line, const char *name, const char *overload, const RoteArg *args, uint32_t n,
                const Tensor *result) {
    if (!rank->recording) {
        return;
    }
    const RoteTensor made = described(result);
    const RoteArg out = tensor_arg(&made);
    const RoteOp op = {.name = name, .overload = overload, .args = args, .outs = &out, .nargs = n, .nouts = 1};
    char source[32];
    snprintf(source, sizeof source, "train_mlp.c:%d", line);
    checked(rote_record_ran(rank->session, &op, source), name);
}

static Tensor *run(Rank *rank, int line, int which, Tensor *a, Tensor *b, double number) {
    const Kernel *kernel = &kernels[which];
    const RoteDlTensor *in[2] = {&a->shared.dl_tensor, b ? &b->shared.dl_tensor : NULL};
    Tensor *made = compute(rank, kernel, in, number, NULL), *out = made ? made : a;
    const RoteTensor tensors[2] = {described(a), described(b ? b : a)};
    RoteArg args[3] = {tensor_arg(&tensors[0]), tensor_arg(&tensors[1])};
    args[0].written = kernel->shape == IN_PLACE;
    RoteArg *last = &args[kernel->tensors];
    *last = (RoteArg){.tag = kernel->last};
    if (kernel->last == ROTE_ARG_INT) {
        last->payload.i = (int64_t)number;
    } else {
        last->payload.f = number;
    }
    const int has_last = kernel->last != ROTE_ARG_NONE || which == SUM; // `sum` has a dtype, which is none
    ran(rank, line, kernel->name, kernel->overload, args, kernel->tensors + (uint32_t)has_last, out);
    return out;
}

static Tensor *transpose(Rank *rank, int line, const Tensor *tensor) {
    const int64_t sizes[2] = {tensor->sizes[1], tensor->sizes[0]};
    const int64_t strides[2] = {tensor->strides[1], tensor->strides[0]};
    Tensor *view = tensor_in(tensor->storage, 2, sizes, strides);
    const RoteTensor given = described(tensor);
    const RoteArg arg = tensor_arg(&given);
    ran(rank, line, "aten::t", "", &arg, 1, view);
    return view;
}

static Tensor *all_reduce(Rank *rank, int line, const Tensor *partial) {
    Tensor *whole = tensor_new(rank, partial->shared.dl_tensor.ndim, partial->sizes);
    Collective work;
    const RoteTensor given = described(partial), made = described(whole);
    const RoteArg args[] = {tensor_arg(&given), text_arg("sum"), text_arg("0")}, waited = tensor_arg(&made);
    all_reduce_start(rank, &work, &partial->shared.dl_tensor, &whole->shared.dl_tensor);
    ran(rank, line, "_c10d_functional::all_reduce", "", args, 3, whole);
    all_reduce_wait(&work);
    ran(rank, line, "_c10d_functional::wait_tensor", "", &waited, 1, whole);
    return whole;
}

typedef struct {
    Tensor *first, *second; // this rank's part of the weights
} Model;

typedef struct {
    float loss, gradient[BATCH * INPUT];
} Results;

#define OP(which, a, b, number) run(rank, __LINE__, which, a, b, number)
#define T(tensor) transpose(rank, __LINE__, tensor)
#define ALL_REDUCE(tensor) all_reduce(rank, __LINE__, tensor)

// One step: returns the loss and the gradient of the batch, which an earlier layer would need.
static void train_step(Rank *rank, const Model *model, Tensor *x, Tensor *target, double lr, Tensor *returned[2]) {
    Tensor *hidden = OP(MM, x, model->first, 0);
    Tensor *active = OP(RELU, hidden, NULL, 0);
    Tensor *partial = OP(MM, active, model->second, 0);
    Tensor *output = ALL_REDUCE(partial);
    Tensor *difference = OP(SUB, output, target, 1);
    Tensor *squares = OP(MUL, difference, difference, 0);
    returned[0] = OP(SUM, squares, NULL, 0);

    Tensor *of_output = OP(MUL_SCALAR, difference, NULL, 2);
    Tensor *active_t = T(active), *second_t = T(model->second), *x_t = T(x), *first_t = T(model->first);
    Tensor *of_second = OP(MM, active_t, of_output, 0);
    Tensor *of_active = OP(MM, of_output, second_t, 0);
    Tensor *of_hidden = OP(THRESHOLD_BACKWARD, of_active, hidden, 0);
    Tensor *of_first = OP(MM, x_t, of_hidden, 0);
    Tensor *of_x = OP(MM, of_hidden, first_t, 0);
    returned[1] = ALL_REDUCE(of_x);

    OP(ADD_, model->first, of_first, -lr);
    OP(ADD_, model->second, of_second, -lr);
    Tensor *done[] = {hidden, active, partial, output, difference, squares, of_output, active_t, second_t,
                      x_t, first_t, of_second, of_active, of_hidden, of_first, of_x};
    for (size_t i = 0; i < sizeof done / sizeof *done; i++) {
        delete(&done[i]->shared);
    }
}

// ---- Training ----

// Copies what a step has returned, and deletes it.
static void keep(RoteDlManagedTensor *const *tensors, Results *results) {
    const RoteDlTensor *gradient = &tensors[1]->dl_tensor;
    memset(results, 0, sizeof *results);
    results->loss = *at(&tensors[0]->dl_tensor, 0, 0);
    for (int64_t i = 0; i < rows(gradient); i++) {
        for (int64_t j = 0; j < columns(gradient); j++) {
            results->gradient[i * INPUT + j] = *at(gradient, i, j);
        }
    }
    for (int i = 0; i < 2; i++) {
        if (tensors[i]->deleter) {
            tensors[i]->deleter(tensors[i]);
        }
    }
}

static void run_eagerly(Rank *rank, const Model *model, Tensor *x, Tensor *target, double lr, Results *results) {
    Tensor *returned[2];
    train_step(rank, model, x, target, lr, returned);
    RoteDlManagedTensor *shared[2] = {&returned[0]->shared, &returned[1]->shared};
    keep(shared, results);
}

static RoteLeaf leaf(const char *name, const Tensor *tensor, const char *spec) {
    return (RoteLeaf){.name = name, .spec = spec, .tensor = &tensor->shared.dl_tensor,
                      .storage = tensor->storage->number, .bytes = tensor->storage->bytes, .state = spec != NULL};
}

static void replayed(Rank *rank, const RoteResults *replay, Results *results) {
    if (replay->n != 2) {
        stop("replay", "it has not given back two tensors");
    }
    rank->replayed++;
    keep(replay->tensors, results);
}

// Records the call that the session was asked about last, or opens a stored plan for it.
static void record(Rank *rank, const Model *model, Tensor *x, Tensor *target, double lr, Results *results) {
    RoteSession *session = rank->session;
    const int64_t all[RANKS] = {0, 1, 2, 3};
    const char *paths[2] = {"loss", "gradient"};
    uint32_t rate = 0, negative = 0, variant = 0;
    int bound = 0;
    checked(rote_record_call(session), "rote_record_call");
    // The step computes -lr and does nothing else with the learning rate: the plan may follow it.
    checked(rote_record_float(session, ROTE_FLOAT_READ, 0, 0, lr, "lr", &rate), "rote_record_float");
    checked(rote_record_float(session, ROTE_FLOAT_NEG, rate, 0, -lr, NULL, &negative), "rote_record_float");
    checked(rote_record_ready(session), "rote_record_ready");
    if (rank->trusts) {
        checked(rote_record_trust(session, &variant, &bound), "rote_record_trust");
    }
    if (bound) {
        RoteResults replay;
        checked(rote_session_step_again(session, &replay), "rote_session_step_again"); // ROTE_REPLAYED is 0
        rank->opened++;
        replayed(rank, &replay, results);
        return;
    }
    Tensor *returned[2];
    rank->recording = 1;
    train_step(rank, model, x, target, lr, returned);
    rank->recording = 0;
    for (int i = 0; i < 2; i++) {
        const RoteTensor tensor = described(returned[i]);
        checked(rote_record_returned(session, paths[i], &tensor, ROTE_NO_INDEX), paths[i]);
    }
    checked(rote_record_group(session, "0", all, RANKS, "tp"), "rote_record_group");
    const char *outcome = rote_record_finish(session, "{\"tuple\": [{\"t\": 0}, {\"t\": 1}]}");
    if (outcome == NULL) {
        stop("rote_record_finish", rote_last_error());
    }
    if (strstr(outcome, "\"refused\"") || strstr(outcome, "\"dropped\"")) {
        stop("the recording was not kept", outcome);
    }
    rank->opened += strstr(outcome, "\"adopted\"") != NULL;
    rank->recorded++;
    RoteDlManagedTensor *shared[2] = {&returned[0]->shared, &returned[1]->shared};
    keep(shared, results);
}

static void run_through_rote(Rank *rank, const Model *model, Tensor *x, Tensor *target, double lr, Results *results) {
    const RoteLeaf leaves[] = {
        leaf("first", model->first, "cpu|4|tp|0,1,2,3|S(1)|32,64|64,1"),
        leaf("second", model->second, "cpu|4|tp|0,1,2,3|S(0)|64,16|16,1"),
        leaf("x", x, NULL),
        leaf("target", target, NULL),
    };
    const RoteCall call = {.leaves = leaves, .n_leaves = 4, .numbers = &lr, .n_numbers = 1};
    RoteResults replay;
    switch (rote_session_step(rank->session, &call, &replay)) {
    case ROTE_REPLAYED: replayed(rank, &replay, results); break;
    case ROTE_RECORD: record(rank, model, x, target, lr, results); break;
    case ROTE_EAGER: run_eagerly(rank, model, x, target, lr, results); break;
    default: stop("rote_session_step", rote_last_error());
    }
    const char *notice = rote_session_notice(rank->session);
    if (notice != NULL) {
        printf("rank %u: %s\n", rank->index, notice);
    }
}

// Numbers between -0.5 and 0.5, other ones for another seed.
static Tensor *random_tensor(Rank *rank, int64_t rows, int64_t columns, uint32_t seed) {
    const int64_t sizes[2] = {rows, columns};
    Tensor *tensor = tensor_new(rank, 2, sizes);
    for (int64_t i = 0; i < rows * columns; i++) {
        seed = seed * 1664525 + 1013904223;
        tensor->storage->data[i] = (float)(seed >> 8) / (float)(1 << 24) - 0.5F;
    }
    return tensor;
}

static int differ(const Tensor *a, const Tensor *b) {
    return memcmp(a->storage->data, b->storage->data, a->storage->bytes) != 0;
}

static double microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

typedef void Runner(Rank *, const Model *, Tensor *, Tensor *, double, Results *);

static double time_of_a_step(Runner *runner, Rank *rank, const Model *model, Tensor *x, Tensor *target) {
    Results results;
    const double begun = microseconds();
    for (int i = 0; i < TIMED; i++) {
        runner(rank, model, x, target, 1e-6, &results);
    }
    return (microseconds() - begun) / TIMED;
}

// Both models take the same steps.
static void train(Rank *rank, const Model models[2], int64_t batch, int steps) {
    for (int step = 0; step < steps; step++) {
        Tensor *x = random_tensor(rank, batch, INPUT, 100 + (uint32_t)step);
        Tensor *target = random_tensor(rank, batch, OUTPUT, 200 + (uint32_t)step);
        const double lr = 1e-3 * (STEPS - step) / STEPS; // another one at every step
        Results eager, ours;
        run_eagerly(rank, &models[0], x, target, lr, &eager);
        run_through_rote(rank, &models[1], x, target, lr, &ours);
        if (memcmp(&eager, &ours, sizeof eager) != 0) {
            stop("a step through Rote differs", "loss or gradient has other bits");
        }
        if (differ(models[0].first, models[1].first) || differ(models[0].second, models[1].second)) {
            stop("a step through Rote differs", "a weight has other bits");
        }
        if (!isfinite(eager.loss)) {
            stop("training", "the loss is no number");
        }
        delete(&x->shared);
        delete(&target->shared);
    }
}

static void *work(void *argument) {
    Rank *rank = argument;
    const RoteFramework framework = {
        .size = sizeof framework, .context = rank, .has_op = has_op, .bind_op = bind_op, .run_op = run_op, .set_number = set_number,
        .forget_op = forget_op, .allocate = allocate, .release = release, .is_alive = is_alive,
        .bind_collective = bind_collective,
        .forget_collective = forget_collective, .start = start, .wait = wait, .gather = gather, .ranks = ranks,
        .error = error};
    rank->session = rote_session_for(&framework, "train_mlp.c:train_step", "toy 1", RANKS, rank->index, rank->plans, 8,
                                     NULL);
    if (rank->session == NULL) {
        stop("rote_session_for", rote_last_error());
    }
    int agrees = 0;
    checked(rote_session_fact(rank->session, ROTE_GUARD_HOST, "lr", 1), "rote_session_fact");
    checked(rote_session_world(rank->session, "0", RANKS, rank->index), "rote_session_world");
    checked(rote_session_agree_in(rank->session, "0", &agrees), "rote_session_agree_in");

    Model models[2];
    for (int i = 0; i < 2; i++) {
        models[i].first = random_tensor(rank, INPUT, SHARD, 1 + rank->index);
        models[i].second = random_tensor(rank, SHARD, OUTPUT, 11 + rank->index);
    }
    train(rank, models, BATCH, STEPS);
    const int recorded = rank->recorded, replays = rank->replayed;
    train(rank, models, BATCH / 2, 4); // another batch size: other plans
    const int recorded_later = rank->recorded - recorded, replays_later = rank->replayed - replays;

    Tensor *x = random_tensor(rank, BATCH, INPUT, 3), *target = random_tensor(rank, BATCH, OUTPUT, 4);
    const double eager = time_of_a_step(run_eagerly, rank, &models[0], x, target);
    const double ours = time_of_a_step(run_through_rote, rank, &models[1], x, target);
    if (differ(models[0].first, models[1].first) || differ(models[0].second, models[1].second)) {
        stop("training on", "a weight has other bits");
    }
    if (rank->index == 0) {
        printf("%d steps on %d ranks: %d recorded, %d replayed, equal bit for bit\n", STEPS, RANKS, recorded, replays);
        printf("4 steps of another batch: %d recorded, %d replayed, equal bit for bit\n", recorded_later,
               replays_later);
        printf("%d plans opened from disk%s\n", rank->opened, rank->trusts && rank->opened ? " and trusted" : "");
        printf("microseconds of a step: %.1f run op by op, %.1f replayed\n", eager, ours);
    }
    Tensor *all[] = {models[0].first, models[0].second, models[1].first, models[1].second, x, target};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        delete(&all[i]->shared);
    }
    checked(rote_session_free(rank->session), "rote_session_free");
    if (rank->held != NULL) {
        stop("a tensor", "was never deleted");
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 3 || (argc == 3 && strcmp(argv[2], "trust") != 0)) {
        fprintf(stderr, "usage: train_mlp PLANS [trust]\n");
        return 2;
    }
    if (rote_abi_version() != ROTE_ABI_VERSION) {
        stop("librote.so", "it is of another version than rote.h");
    }
    Rank all[RANKS] = {0};
    pthread_t threads[RANKS];
    for (uint32_t i = 0; i < RANKS; i++) {
        all[i].index = i;
        all[i].plans = argv[1];
        all[i].trusts = argc == 3;
        if (pthread_create(&threads[i], NULL, work, &all[i]) != 0) {
            stop("a thread", "could not be made");
        }
    }
    for (int i = 0; i < RANKS; i++) {
        pthread_join(threads[i], NULL);
    }
    return 0;
}
