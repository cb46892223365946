// A bridge without PyTorch: every function of backends/aten/src/sys.rs, none of
// which does anything. It lets sessions exist, to see what wrong calls do.

unsigned rote_bridge_abi(void) { return 20; }
const char *rote_bridge_error(void) { return "the stub fails"; }
const char *rote_bridge_table_text(void) { return ""; }

void *rote_bridge_call_hold(void) {
    static int held;
    return &held;
}

void *rote_bridge_call_leaf(void) {
    static int leaf;
    return &leaf;
}

#define STUB(name) \
    __attribute__((weak)) void *rote_bridge_##name(void) { return 0; }

STUB(describer_new)
STUB(describer_free)
STUB(program_draws)
STUB(program_undo)
STUB(describe_op)
STUB(describe_observed)
STUB(work)
STUB(observe)
STUB(describe_tensor)
STUB(storage_alive)
STUB(rng_digest)
STUB(call_new)
STUB(call_free)
STUB(call_state)
STUB(call_world)
STUB(call_owner)
STUB(held_free)
STUB(held_difference)
STUB(call_collect)
STUB(tensor_place)
STUB(number_in)
STUB(table_new)
STUB(table_free)
STUB(table_add)
STUB(table_read)
STUB(table_hold)
STUB(table_same)
STUB(read_float)
STUB(program_new)
STUB(program_free)
STUB(program_exception)
STUB(program_lost)
STUB(program_differs)
STUB(program_expect)
STUB(program_leave_shape)
STUB(program_op)
STUB(program_arena)
STUB(program_place)
STUB(program_fix)
STUB(program_view)
STUB(program_collective)
STUB(program_put)
STUB(program_number)
STUB(program_clear)
STUB(written)
STUB(program_output)
STUB(program_shown)
STUB(with_gil)
STUB(program_listened)
STUB(range_begin)
STUB(range_end)
STUB(run)
STUB(run_op)
STUB(run_view)
STUB(run_collective)
STUB(run_wait)
STUB(run_rng)
STUB(run_free)
STUB(group)
STUB(gather)
STUB(compare_checks)
STUB(found_answer)
STUB(without_gil)
STUB(watch_new)
STUB(watch_free)
STUB(watch_rise)
STUB(call_op)
STUB(list_new)
STUB(list_set)
STUB(incref)
STUB(decref)
