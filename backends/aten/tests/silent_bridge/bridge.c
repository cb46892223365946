// A bridge whose kernels do nothing, for plans that bind and replay without
// PyTorch: what is left of a replay is Rust. Linked with tests/stub_bridge.c,
// whose functions these replace.

#include <stdint.h>
#include <stdlib.h>

typedef struct {
    uint32_t leaf, field;
} Fact;

// Never read or written through: stands for programs and Python objects.
static char thing;

void *rote_bridge_program_new(uint32_t values, uint32_t rng_slots) {
    (void)values, (void)rng_slots;
    return &thing;
}

void *rote_bridge_program_output(void *program, uint32_t value, int fresh) {
    (void)program, (void)value, (void)fresh;
    return &thing;
}

void *rote_bridge_list_new(uint32_t n) {
    (void)n;
    return &thing;
}

int rote_bridge_run(void *program, int (*body)(void *), void *context) {
    (void)program;
    return body(context);
}

// One tensor argument: the structure, the twelve modes, and what is guarded of it.
enum { WORDS = 20 };

int rote_bridge_call_collect(void *call, void *args, void *kwargs, const uint64_t **words, const Fact **facts,
                             uint32_t *n) {
    static uint64_t zeros[WORDS];
    static Fact fields[WORDS];
    (void)call, (void)args, (void)kwargs;
    *words = zeros;
    *facts = fields;
    *n = WORDS;
    return 0;
}

// A table of facts of one word each, all zero.
typedef struct {
    uint32_t words;
} Table;

void *rote_bridge_table_new(void) { return calloc(1, sizeof(Table)); }
void rote_bridge_table_free(void *table) { free(table); }

int rote_bridge_table_add(Table *table, uint32_t kind, void *container, void *key, uint32_t *width) {
    (void)kind, (void)container, (void)key;
    table->words++;
    *width = 1;
    return 0;
}

int rote_bridge_table_read(const Table *table, const void *call, uint64_t *out) {
    for (uint32_t i = 0; i < table->words; i++) out[i] = 0;
    return 0;
}

// A learning rate that a scheduler changes at every step.
int rote_bridge_read_float(const Table *table, uint32_t word, double *out) {
    static double rate;
    (void)table, (void)word;
    *out = rate += 0.5;
    return 0;
}
