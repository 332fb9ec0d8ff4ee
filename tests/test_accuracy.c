/* The MLP on Fashion-MNIST, 784-1024-1024-10, three epochs: at least 0.87 of the test pictures are told right, in f32 and bf16, and on 1, 2
 * and 3 ranks under ddp and fsdp within 0.01 of one another. Part of the full matrices: minutes. On a GPU the same, in f32, bf16 and f16.
 *
 * Labels: release gpu
 * Timeout: 1800 s
 */
#include "tests/check.h"

#include <sys/stat.h>

static const char data[] = "/usr/share/datasets/fashion-mnist";

/* "accuracy" of OUT/summary.json. */
static double accuracy_in(const char *out)
{
    char path[4096], text[8192];
    snprintf(path, sizeof path, "%s/summary.json", out);
    FILE *f = fopen(path, "r");
    ck_assert_msg(f != NULL, "%s was not written", path);
    text[fread(text, 1, sizeof text - 1, f)] = 0;
    fclose(f);
    const char *at = strstr(text, "\"accuracy\":");
    ck_assert_msg(at != NULL, "%s has no accuracy", path);
    return strtod(at + strlen("\"accuracy\":"), NULL);
}

static double train(const char *device, const char *dtype, int ranks, const char *strategy)
{
    char out[256], command[4096];
    snprintf(out, sizeof out, "accuracy_%s_%s_%d_%s", device, dtype, ranks, strategy);
    snprintf(command, sizeof command,
             "%s/mlp train --data %s --epochs 3 --batch 144 --device %s --dtype %s --ranks %d --strategy %s --out %s > /dev/null", TANDEM_BIN, data,
             device, dtype, ranks, strategy, out);
    ck_assert_msg(system(command) == 0, "%s", command);
    double accuracy = accuracy_in(out);
    printf("%-4s %-5s %d ranks %-7s accuracy %.4f\n", device, dtype, ranks, strategy, accuracy);
    fflush(stdout);
    return accuracy;
}

START_TEST(test_every_way_reaches_the_accuracy)
{
    struct stat there;
    if (!check_all()) SKIP("part of the full matrices (TANDEM_TEST_ALL=1)");
    if (stat(data, &there)) SKIP("dataset-fashion-mnist is not installed");
    double least = 1, most = 0;
    for (int d = 0; d < (has_bf16_products() ? 2 : 1); d++)
        for (int ranks = 1; ranks <= 3; ranks++)
            for (int s = 0; s < (ranks > 1 ? 2 : 1); s++) {
                double a = train("cpu", d ? "bf16" : "f32", ranks, ranks == 1 ? "single" : s ? "fsdp" : "ddp");
                if (a < least) least = a;
                if (a > most) most = a;
            }
    ck_assert_double_ge(least, 0.87);
    ck_assert_double_le(most - least, 0.01);
}
END_TEST

START_TEST(test_a_gpu_reaches_the_accuracy)
{
    struct stat there;
    td_context *td = td_open(&(td_options){ .device = "cuda", .log = check_log_line });
    bool has_gpu = td_error(td) == TD_OK;
    td_close(td);
    if (!has_gpu) SKIP("no CUDA device");
    if (stat(data, &there)) SKIP("dataset-fashion-mnist is not installed");
    double f32 = train("cuda", "f32", 1, "single"), bf16 = train("cuda", "bf16", 1, "single"), f16 = train("cuda", "f16", 1, "single");
    ck_assert_double_ge(f32, 0.87);
    ck_assert_double_ge(bf16, 0.87);
    ck_assert_double_ge(f16, 0.87);
}
END_TEST

TESTS("accuracy", test_a_gpu_reaches_the_accuracy, test_every_way_reaches_the_accuracy)
