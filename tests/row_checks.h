/* Sums and maxima that chains take along on a GPU, or with the host as one, against the CPU with chain and reduction apart. */
#ifndef TANDEM_TESTS_ROW_CHECKS_H
#define TANDEM_TESTS_ROW_CHECKS_H

#include "tests/cases.h"
#include "tests/row_forms.h"

/* Of bf16 and f16 a few elements are rounded to the other side. */
static const struct { td_dtype dtype; double allowed; } dtypes[] = { { TD_F32, 1e-5 }, { TD_BF16, 1e-2 }, { TD_F16, 0x1p-9 } };

/* On the device "cuda", in the first `count` of those dtypes, and then `runs` times as graphs, of whose runs the first is none. */
static inline CHECK_UNUSED void check_rows(int count, int runs)
{
    const td_shape shapes[] = { TD_SHAPE(50, 16), TD_SHAPE(3, 2, 37), TD_SHAPE(64, 64), TD_SHAPE(700, 320), TD_SHAPE(7, 1031),
                                TD_SHAPE(2, 3, 2048), TD_SHAPE(2, 50000), TD_SHAPE(1, 200003) };
    static runner cpu, poisoned, graph;
    runner_open(&poisoned, TD_F32, (run_options){ .device = "cuda" });
    runner_open(&graph, TD_F32, (run_options){ .device = "cuda", .unpoisoned = true });
    runner_open(&cpu, TD_F32, (run_options){ .passes = "-rows" });
    for (int f = 0; f < FORMS; f++)
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (int d = 0; d < count; d++) {
                if (forms[f].record == distances && s == 3) continue; /* of each of 700 rows to each */
                outcome want = run_in(&cpu, &forms[f], dtypes[d].dtype, shapes[s]);
                outcome got = run_in(&poisoned, &forms[f], dtypes[d].dtype, shapes[s]);
                double error = relative_error(got.values, want.values, want.count);
                ck_assert_int_eq(got.calls, forms[f].calls);
                ck_assert_msg(error <= dtypes[d].allowed, "%s, shape %d, %s: off by %.3g", forms[f].note, (int)s, td_dtype_name(dtypes[d].dtype), error);
                for (int r = 0; r < runs; r++) {
                    outcome again = run_in(&graph, &forms[f], dtypes[d].dtype, shapes[s]);
                    ck_assert_mem_eq(got.values, again.values, (size_t)want.count * sizeof(double));
                }
            }
    td_close(cpu.td);
    td_close(graph.td);
    td_close(poisoned.td);
}

#endif
