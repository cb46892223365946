// A bridge whose kernels do nothing, for plans that bind and replay without
// PyTorch: what is left of a replay is Rust. Linked with tests/stub_bridge.c,
// whose functions these replace.

#include "../../bridge/abi.h"

namespace rote {

// A table of facts of one word each, all zero.
class FactTable {
 public:
  uint32_t words = 0;
};

extern "C" {

// Never read or written through: stands for programs and Python objects.
static char thing;

Program *rote_bridge_program_new(uint32_t, uint32_t) { return reinterpret_cast<Program *>(&thing); }

PyObject *rote_bridge_program_output(Program *, uint32_t, int) { return reinterpret_cast<PyObject *>(&thing); }

PyObject *rote_bridge_list_new(uint32_t) { return reinterpret_cast<PyObject *>(&thing); }

int rote_bridge_run(Program *, int (*body)(void *), void *context) { return body(context); }

// One tensor argument: the structure, the twelve modes, and what is guarded of it.
int rote_bridge_call_collect(Call *, PyObject *, PyObject *, const uint64_t **words, const WordSubject **subjects,
                             uint32_t *n) {
  constexpr uint32_t count = 20;
  static uint64_t zeros[count];
  static WordSubject fields[count];
  *words = zeros;
  *subjects = fields;
  *n = count;
  return 0;
}

FactTable *rote_bridge_table_new(Call *) { return new FactTable; }
void rote_bridge_table_free(FactTable *table) { delete table; }

int rote_bridge_table_add(FactTable *table, uint32_t, PyObject *, PyObject *, uint32_t *width) {
  table->words++;
  *width = 1;
  return 0;
}

int rote_bridge_table_read(const FactTable *table, const Call *, uint64_t *out, int) {
  for (uint32_t i = 0; i < table->words; i++) out[i] = 0;
  return 0;
}

// A learning rate that a scheduler changes at every step.
int rote_bridge_read_float(const FactTable *, uint32_t, double *out) {
  static double rate;
  *out = rate += 0.5;
  return 0;
}
}

}  // namespace rote
