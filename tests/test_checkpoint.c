/* Checkpoints of several ranks: who writes what, any world to any other, what a kill or a full disk leaves.
 *
 * Models have what a sharding gets wrong elsewhere: sizes that no number of ranks divides, tied weights with 67 tokens, several units.
 * An epoch ends between the save and what follows it. By default a selection; TANDEM_TEST_ALL=1: all.
 *
 * Timeout: 600 s
 */
#include <sys/stat.h>
#include <unistd.h>

#define SHELL_FOLDER "test_checkpoint_files"
#include "core/json.h"
#include "tests/shell.h"

/* 100 rows of 7 numbers and a class; every tenth is for testing, so that 36 rows are taken twice an epoch. */
static void make_table(void)
{
    mkdir(SHELL_FOLDER, 0777);
    FILE *to = fopen(SHELL_FOLDER "/table.csv", "w");
    ck_assert_ptr_nonnull(to);
    for (uint64_t row = 0; row < 100; row++) {
        double first = check_normal(row * 7);
        for (uint64_t i = 0; i < 7; i++) fprintf(to, "%.6f,", check_normal(row * 7 + i));
        fprintf(to, "%d\n", first > 0.7 ? 4 : first > 0.2 ? 3 : first > -0.2 ? 2 : first > -0.7 ? 1 : 0);
    }
    ck_assert_int_eq(fclose(to), 0);
}

#define UNITS "--bucket-bytes 3000 --unit-elements 500 --whole-elements 30 "
#define MLP "$MLP train --data table.csv --classes 5 --batch 36 --dropout 0.2 --dtype f64 --threads 1 --log-every 1 "

static double file_bytes(const char *format, ...) TD_PRINTF(1, 2);
static double file_bytes(const char *format, ...)
{
    char path[256], whole[512];
    struct stat status;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(path, sizeof path, format, arguments);
    va_end(arguments);
    snprintf(whole, sizeof whole, SHELL_FOLDER "/%s", path);
    ck_assert_msg(!stat(whole, &status), "%s: %s", whole, strerror(errno));
    return (double)status.st_size;
}

/* ---- Who writes what -------------------------------------------------------------------------------------- */

START_TEST(test_every_rank_writes_its_share)
{
    static const struct { const char *strategy; int ranks; } worlds[] = {
        { "ddp", 4 }, { "zero1", 3 }, { "zero2", 2 }, { "zero3 --whole-elements 200", 4 }, { "fsdp", 3 }, { "hsdp:2x2", 4 }, { "hsdp:1x3", 3 },
    };
    make_table();
    ck_assert_sh(0, "rm -rf one; " MLP "--hidden 128,131 --steps 2 --out one");
    double whole = file_bytes("one/checkpoints/step-2/rank-0.safetensors");
    for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++) {
        int ranks = worlds[w].ranks;
        double all = 0;
        ck_assert_sh(0, "rm -rf share; " MLP "--hidden 128,131 --steps 2 --out share --ranks %d --strategy %s", ranks, worlds[w].strategy);
        for (int rank = 0; rank < ranks; rank++) {
            double bytes = file_bytes("share/checkpoints/step-2/rank-%d.safetensors", rank);
            ck_assert_msg(bytes < 1.05 * whole / ranks, "%s: rank %d of %d writes %.0f bytes of %.0f", worlds[w].strategy, rank, ranks, bytes,
                          whole);
            all += bytes;
        }
        ck_assert_msg(fabs(all - whole) < 0.02 * whole, "%s: %.0f bytes, not %.0f", worlds[w].strategy, all, whole);
    }
}
END_TEST

TESTS("checkpoint", test_every_rank_writes_its_share)
