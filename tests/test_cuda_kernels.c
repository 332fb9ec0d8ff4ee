/* What the CPU can, CUDA can: every operation of the library has a kernel there, and so has every rule of an optimizer. Needs no GPU.
 * Labels: cuda
 */
#include <dirent.h>

#include "core/internal.h"
#include "core/ops/attention.h"
#include "tests/cases.h"

#include <tandem/nn.h>
#include <tandem/optim.h>

#include "parallel/strategy.h"

/* ---- Operations */

typedef struct listed {
    const char *name;                         /* of the descriptor */
    const td_op *op;
} listed;

#define LIST_OPERATION(name) { "td_op_" #name, &td_op_##name },
#define LIST(name) { #name, &name }
static const listed all[] = {
    TD_OPERATIONS(LIST_OPERATION)
    LIST(td_op_attention_gradient), LIST(td_op_with_gradient),
    LIST(td_op_input), LIST(td_op_scalar), LIST(td_op_parameter), LIST(td_op_assign), LIST(td_op_output), LIST(td_op_backward), LIST(td_op_gradient),
    LIST(td_op_unit), LIST(td_op_store), LIST(td_op_part), LIST(td_op_pack), LIST(td_op_mark),
    LIST(td_op_gradients), LIST(td_op_gradient_norm), LIST(td_op_update), LIST(td_op_blend),
    LIST(td_op_sum_squares), LIST(td_op_max_abs), LIST(td_op_update_unit), LIST(td_op_merge_rows), LIST(td_op_update_rows),
    LIST(td_op_to_host), LIST(td_op_to_device),
    LIST(par_op_all_reduce), LIST(par_op_reduce_scatter), LIST(par_op_all_gather),
    LIST(par_op_own_part), LIST(par_op_count_once), LIST(par_op_own_members),
};
enum { ALL = sizeof all / sizeof *all };

/* Only of these a plan makes calls. */
static bool is_called(const td_op *op) { return !(op->flags & (TD_OP_SOURCE | TD_OP_VIEW | TD_OP_EFFECT | TD_OP_VIRTUAL)); }

START_TEST(test_every_operation_has_a_kernel)
{
    int lacking = 0;
    for (int i = 0; i < ALL; i++) {
        if (!is_called(all[i].op) || all[i].op->cuda.run) continue;
        printf("%s has no kernel on CUDA\n", all[i].name);
        lacking++;
    }
    ck_assert_int_eq(lacking, 0);
}
END_TEST

/* ---- What the sources define */

static bool is_listed(const char *name)
{
    for (int i = 0; i < ALL; i++)
        if (!strcmp(all[i].name, name)) return true;
    return false;
}

/* Calls visit(name) for each "const KIND NAME =" that begins a line of a folder's .c files; how many. */
static int visit_definitions(const char *folder, const char *kind, void (*visit)(const char *name))
{
    char path[512], line[1024], name[64], form[64];
    int count = 0;
    snprintf(path, sizeof path, "%s/%s", TANDEM_SOURCE, folder);
    snprintf(form, sizeof form, "const %s %%63[a-z0-9_] =", kind);
    DIR *d = opendir(path);
    ck_assert_msg(d != NULL, "%s", path);
    for (struct dirent *e; (e = readdir(d));) {
        size_t length = strlen(e->d_name);
        if (length < 2 || strcmp(e->d_name + length - 2, ".c")) continue;
        snprintf(path, sizeof path, "%s/%s/%.200s", TANDEM_SOURCE, folder, e->d_name);
        FILE *f = fopen(path, "r");
        ck_assert_msg(f != NULL, "%s", path);
        while (fgets(line, sizeof line, f)) {
            const char *from = strncmp(line, "static ", 7) ? line : line + 7;
            if (sscanf(from, form, name) != 1 || !strstr(line, " = {")) continue;
            count++;
            if (visit) visit(name);
        }
        fclose(f);
    }
    closedir(d);
    return count;
}

static void must_be_listed(const char *name) { ck_assert_msg(is_listed(name), "%s is an operation that this test does not know", name); }

START_TEST(test_every_operation_is_known_here)
{
    ck_assert_int_gt(visit_definitions("core/ops", "td_op", must_be_listed), 50);
    ck_assert_int_ge(visit_definitions("parallel", "td_op", must_be_listed), 6);
}
END_TEST

/* ---- Rules */

/* The rule with which one step of the optimizer, made by `make`, was recorded. */
#define CHECK_RULE(make)                                                                                  \
    do {                                                                                                  \
        td_context *td = open_cpu(TD_F32);                                                                \
        td_module root = td_root(td);                                                                     \
        nn_linear layer = nn_linear_make(root, "layer", 3, 2);                                            \
        opt_optimizer *opt = make;                                                                        \
        td_backward(td_sum(nn_linear_apply(&layer, ones(td, 4, 3)), TD_ALL, TD_DROP));                    \
        opt_step(opt, 0.1);                                                                               \
        ck_assert_no_error(td);                                                                           \
        ck_assert_int_eq(td->rule_count, 1);                                                              \
        wrong += lacks_kernel(td->rules[0]);                                                              \
        checked++;                                                                                        \
        td_close(td);                                                                                     \
    } while (0)

/* Ranges are what rules without moments of rows get; rows what those with them get, and those of tables with row-sparse gradients. */
static int lacks_kernel(const td_update_rule *rule)
{
    bool by_rows = td_rule_has_row_moments(rule);
    bool lacks = (!by_rows && !rule->cuda) || ((by_rows || rule->sparse) && !rule->cuda_rows);
    if (lacks) printf("%s lacks a kernel on CUDA\n", rule->name);
    return lacks;
}

START_TEST(test_every_rule_has_its_kernels)
{
    int wrong = 0, checked = 0;
    CHECK_RULE(opt_sgd(root, NULL));
    CHECK_RULE(opt_sgd(root, &(opt_sgd_options){ .momentum = 0.9 }));
    CHECK_RULE(opt_adam(root, NULL));
    CHECK_RULE(opt_adamw(root, NULL));
    CHECK_RULE(opt_adagrad(root, NULL));
    CHECK_RULE(opt_adagrad(root, &(opt_adagrad_options){ .row_wise = true }));
    CHECK_RULE(opt_lion(root, NULL));
    ck_assert_int_eq(wrong, 0);
    ck_assert_int_eq(checked, visit_definitions("optim", "td_update_rule", NULL));
}
END_TEST

TESTS("cuda_kernels", test_every_operation_has_a_kernel, test_every_operation_is_known_here, test_every_rule_has_its_kernels)
