/* The MLP on Fashion-MNIST, 784-1024-1024-10, three epochs: at least 0.87 of the test pictures are told right, in f32 and bf16, and on 1, 2
 * and 3 ranks under ddp and fsdp within 0.01 of one another. Part of the full matrices: minutes.
 *
 * Labels: release
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

static double train(const char *dtype, int ranks, const char *strategy)
{
    char out[256], command[4096];
    snprintf(out, sizeof out, "accuracy_%s_%d_%s", dtype, ranks, strategy);
    snprintf(command, sizeof command, "%s/mlp train --data %s --epochs 3 --batch 144 --dtype %s --ranks %d --strategy %s --out %s > /dev/null",
             TANDEM_BIN, data, dtype, ranks, strategy, out);
    ck_assert_msg(system(command) == 0, "%s", command);
    double accuracy = accuracy_in(out);
    printf("%-5s %d ranks %-7s accuracy %.4f\n", dtype, ranks, strategy, accuracy);
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
                double a = train(d ? "bf16" : "f32", ranks, ranks == 1 ? "single" : s ? "fsdp" : "ddp");
                if (a < least) least = a;
                if (a > most) most = a;
            }
    ck_assert_double_ge(least, 0.87);
    ck_assert_double_le(most - least, 0.01);
}
END_TEST

TESTS("accuracy", test_every_way_reaches_the_accuracy)
