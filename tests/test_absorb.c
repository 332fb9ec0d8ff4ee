/* Attention that reads rows: the copies around it are gone, and every bit is as with them. Under valgrind, which has no AVX-512, the
 * plain kernels run.
 *
 * Labels: valgrind
 */
#include "tests/check.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

#include <string.h>

enum { BATCH = 3, STEPS = 3 };

typedef struct form {
    const char *note;
    td_dtype dtype;
    int64_t positions, width, heads, kv_heads;
    bool packed, rotates;
    double dropout;
} form;

static const form forms[] = {
    { "one product for q, k and v", TD_F32, 40, 24, 3, 3, true, false, 0 },
    { "dropout, several blocks", TD_F32, 70, 32, 2, 2, true, false, 0.3 },
    { "f64", TD_F64, 9, 20, 4, 4, true, false, 0.1 },
    { "bf16", TD_BF16, 40, 32, 2, 2, true, false, 0.1 },
    { "heads that share keys", TD_F32, 37, 24, 4, 2, true, false, 0 },
    { "products of their own", TD_F64, 9, 24, 4, 2, false, false, 0 },
    { "rotated queries and keys", TD_F32, 20, 32, 4, 2, true, true, 0.1 },
};

typedef struct outcome {
    double losses[STEPS];
    int64_t calls;
    char program[1 << 16];                    /* as last printed: after fuse, or before it where that is left out */
} outcome;

static void keep_program(void *user, td_level level, const char *text)
{
    outcome *o = user;
    if (level == TD_LOG_PROGRAM) snprintf(o->program, sizeof o->program, "%s", text);
}

static void train(const form *f, const char *passes, outcome *o)
{
    *o = (outcome){ .calls = 0 };
    td_context *td = td_open(&(td_options){ .dtype = f->dtype, .seed = 7, .threads = 2, .poison = true, .passes = passes,
                                            .print = "simplify,fuse", .log = keep_program, .log_user = o });
    nn_attention_options options = { .kv_heads = f->kv_heads, .packed = f->packed, .dropout = f->dropout,
                                     .rotary = f->rotates ? &(td_rotary_options){ .theta = 10000 } : NULL };
    nn_attention layer = nn_attention_make_with(td_root(td), "attn", f->width, f->heads, &options);
    opt_optimizer *opt = opt_adamw(td_root(td), NULL);
    int64_t count = BATCH * f->positions * f->width;
    double *x = malloc((size_t)count * sizeof *x);
    if (!x) exit(1);
    for (int64_t i = 0; i < count; i++) x[i] = check_normal((uint64_t)i);
    if (f->dtype != TD_F64)
        for (int64_t i = 0; i < count; i++) ((float *)x)[i] = (float)x[i];
    for (int step = 0; step < STEPS; step++) {
        td_tensor in = td_batch(td, "x", td_float(td), TD_SHAPE(BATCH, f->positions, f->width), x);
        td_tensor loss = td_mean(td_square(td_sub(nn_attention_apply(&layer, in), in)), TD_ALL, TD_DROP);
        td_backward(loss);
        opt_step(opt, 1e-2);
        ck_assert_msg(td_step(td), "%s: %s", f->note, td_error_text(td));
        o->losses[step] = td_item(loss);
    }
    o->calls = td_last_report(td).calls;
    td_close(td);
    free(x);
}

static outcome with, without;

START_TEST(test_bits_are_those_of_the_copies)
{
    bool bf16 = has_bf16_products();
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (forms[i].dtype == TD_BF16 && !bf16) continue;
        train(&forms[i], NULL, &with);
        train(&forms[i], "-fuse", &without);
        ck_assert_msg(with.losses[0] != with.losses[STEPS - 1], "%s: nothing was learned", forms[i].note);
        for (int step = 0; step < STEPS; step++)
            ck_assert_msg(with.losses[step] == without.losses[step], "%s: step %d: %.17g, with copies %.17g", forms[i].note, step,
                          with.losses[step], without.losses[step]);
    }
}
END_TEST

START_TEST(test_no_copy_is_left_around_packed_attention)
{
    train(&forms[0], NULL, &with);
    ck_assert_msg(strstr(with.program, "rows q k v o packed"), "%s", with.program);
    ck_assert_msg(!strstr(with.program, "transpose") && !strstr(with.program, "slice") && !strstr(with.program, "concat"), "%s",
                  with.program);
    train(&forms[0], "-fuse", &without);
    ck_assert_msg(strstr(without.program, "transpose") && strstr(without.program, "slice") && strstr(without.program, "concat"), "%s",
                  without.program);
}
END_TEST

/* Rotation reads heads: q and k stay as they were, v and o are rows. */
START_TEST(test_what_is_rotated_stays_heads)
{
    train(&forms[6], NULL, &with);
    ck_assert_msg(strstr(with.program, "rows v o]"), "%s", with.program);
}
END_TEST

TESTS("absorb", test_bits_are_those_of_the_copies, test_no_copy_is_left_around_packed_attention, test_what_is_rotated_stays_heads)
