/* FSDP on 4 CPU ranks, as threads of this process: blocks of layers whose parameters, gradients and moments lie in four parts,
 * gathered block by block where they are used. The model is written as for one rank. --ranks 4 --strategy fsdp does the same for a
 * program that opens a run.
 *
 *     build/bin/examples/fsdp
 */
#include <stdio.h>

#include <tandem/tandem.h>

enum { RANKS = 4, BLOCKS = 3, WIDTH = 64, ROWS = 32, CLASSES = 8, STEPS = 60 };

typedef struct net {
    nn_linear block[BLOCKS], out;             /* "h.0", "h.1", "h.2": each is gathered by itself; "out" stays gathered */
} net;

static net make(td_module root)
{
    net n;
    td_module blocks = td_child(root, "h");
    for (int b = 0; b < BLOCKS; b++) {
        char name[16];
        snprintf(name, sizeof name, "%d", b);
        n.block[b] = nn_linear_make(blocks, name, WIDTH, WIDTH);
    }
    n.out = nn_linear_make(root, "out", WIDTH, CLASSES);
    return n;
}

static td_tensor loss_of(const net *n, td_tensor x, td_tensor label)
{
    for (int b = 0; b < BLOCKS; b++) x = td_add(x, td_gelu(nn_linear_apply(&n->block[b], x)));
    return td_cross_entropy(nn_linear_apply(&n->out, x), label);
}

/* This rank's rows of the batch: a class is a stripe of larger numbers. */
static void fill(int first, int own, float x[ROWS][WIDTH], int32_t label[ROWS])
{
    for (int r = 0; r < own; r++) {
        label[r] = (first + r) % CLASSES;
        for (int i = 0; i < WIDTH; i++) x[r][i] = (float)((5 * (first + r) + 3 * i) % 7) / 7 + (i % CLASSES == label[r]);
    }
}

typedef struct outcome {
    const char *strategy;
    double loss;
    td_report report;
} outcome;

static int train(par_world *world, int rank, void *user)
{
    outcome *o = user;
    td_context *td = td_open(&(td_options){ .threads = 1 });
    par_attach(td, world, rank, &(par_options){ .strategy = o->strategy });
    net n = make(td_root(td));
    opt_optimizer *opt = opt_adamw(td_root(td), NULL);
    float x[ROWS][WIDTH];
    int32_t label[ROWS];
    int own = ROWS / par_world_size(world);
    double last = 0;
    fill(rank * own, own, x, label);
    for (int step = 0; step < STEPS && td_error(td) == TD_OK; step++) {
        td_tensor loss = loss_of(&n, td_batch(td, "x", TD_F32, TD_SHAPE(ROWS, WIDTH), x), td_batch(td, "label", TD_I32, TD_SHAPE(ROWS), label));
        td_backward(loss);
        opt_step(opt, 3e-3);
        if (td_step(td)) last = td_item(loss); /* of the whole batch, on every rank */
    }
    if (rank == 0) o->loss = last, o->report = td_last_report(td);
    bool good = td_error(td) == TD_OK;
    if (!good) fprintf(stderr, "%s\n", td_error_text(td));
    td_close(td);
    return good ? 0 : 1;
}

int main(void)
{
    outcome runs[] = { { .strategy = "ddp" }, { .strategy = "fsdp" } };
    for (int i = 0; i < 2; i++) {
        if (par_run_threads(RANKS, NULL, train, &runs[i])) return 1;
        const td_report *r = &runs[i].report;
        printf("%-4s  loss %.6f  a rank holds %lld bytes of state and sends %lld bytes a step in %lld calls\n", runs[i].strategy, runs[i].loss,
               (long long)r->state_bytes, (long long)r->comm_bytes, (long long)r->comm_calls);
    }
    double apart = runs[0].loss - runs[1].loss;
    bool shared = runs[1].report.state_bytes * 100 < runs[0].report.state_bytes * 35;
    return !(shared && runs[0].loss < 0.5 && apart < 1e-5 && apart > -1e-5);
}
