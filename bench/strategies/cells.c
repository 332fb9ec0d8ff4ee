/* The cells: which there are, and what the model's binary says of each. */
#include <stdlib.h>
#include <string.h>

#include "bench/strategies/strategies.h"

/* ---- The matrix */

/* "hsdp:SxR" with the ranks filled in, groups as large as they can be; false: the ranks make no groups. */
static bool fill_sizes(char *name, int ranks)
{
    char *sizes = strstr(name, ":SxR");
    int group = ranks / 2;
    if (!sizes) return true;
    while (group > 1 && ranks % group) group--;
    if (group <= 1) return false;
    snprintf(sizes, 32, ":%dx%d", group, ranks / group);
    return true;
}

static bool add_cell(bench *b, const char *name, size_t length, int ranks)
{
    cell *c = &b->cells[b->cell_count];
    if (!length || length > sizeof c->strategy - 32 || b->cell_count == CELLS) {
        fprintf(stderr, "strategies: --strategies takes names with commas between them, %d cells at most\n", CELLS);
        return false;
    }
    *c = (cell){ .ranks = ranks, .efficiency = (double)NAN, .difference = (double)NAN };
    c->measured = c->planned = (figures){ (double)NAN, (double)NAN, (double)NAN, (double)NAN, (double)NAN, (double)NAN };
    memcpy(c->strategy, name, length);
    if (fill_sizes(c->strategy, ranks)) b->cell_count++;
    return true;
}

/* One rank has one cell, which is the baseline. */
static bool add_ranks(bench *b, const char *strategies, int ranks)
{
    const char *list = strcmp(strategies, "all") ? strategies : par_strategy_names_for_ranks();
    if (ranks == 1) return add_cell(b, "single", strlen("single"), 1);
    for (const char *at = list; *at;) {
        size_t length = strcspn(at, ",");
        if (!add_cell(b, at, length, ranks)) return false;
        at += length;
        at += strspn(at, ", ");
    }
    return true;
}

bool cells_make(bench *b, const char *strategies, const char *ranks)
{
    for (const char *at = ranks; *at;) {
        char *end;
        long n = strtol(at, &end, 10);
        if (end == at || n < 1 || n > 256 || (*end && *end != ',')) {
            fprintf(stderr, "strategies: --ranks takes whole numbers from 1 to 256 with commas between them, not '%.80s'\n", ranks);
            return false;
        }
        if (!add_ranks(b, strategies, (int)n)) return false;
        at = *end ? end + 1 : end;
    }
    return true;
}

const cell *cells_baseline(const bench *b)
{
    for (int i = 0; i < b->cell_count; i++)
        if (b->cells[i].ranks == 1 && b->cells[i].done && !*b->cells[i].error) return &b->cells[i];
    return NULL;
}

/* ---- Commands */

typedef struct command {
    char *argv[WORDS + SHAPE_WORDS + 40];
    char text[16][PATH_ROOM / 8];             /* of numbers and paths */
    int count, texts;
} command;

static void add(command *c, const char *word) { c->argv[c->count++] = (char *)word; }

static void add_number(command *c, const char *flag, int64_t value)
{
    char *text = c->text[c->texts++];
    snprintf(text, sizeof c->text[0], "%lld", (long long)value);
    add(c, flag);
    add(c, text);
}

static void begin(const bench *b, const cell *of, const char *name, const char *ranks, command *c)
{
    *c = (command){ .count = 0 };
    add(c, b->binary);
    add(c, name);
    if (b->shape) {
        add(c, "--clip"), add(c, "0");
        for (int i = 0; i < SHAPE_WORDS && b->shape->words[i]; i++) add(c, b->shape->words[i]);
    }
    if (b->rank_rows) add_number(c, "--batch", (int64_t)b->rank_rows * par_batch_parts(of->strategy, of->ranks));
    for (int i = 0; i < b->word_count; i++) add(c, b->words[i]); /* later ones hold */
    add(c, "--device");
    add(c, b->device);
    if (b->dtype) add(c, "--dtype");
    if (b->dtype) add(c, b->dtype);
    add(c, "--strategy");
    add(c, of->strategy);
    add_number(c, ranks, of->ranks);
    add_number(c, "--threads", (int64_t)b->rank_threads * (b->rehearses && !strcmp(name, "bench") ? 1 : of->ranks));
    add(c, "--json");
}

/* The object that the command prints; NULL: it failed, or the cell says why there is none. */
static td_json_document *ask(bench *b, command *c, char error[ERROR_ROOM])
{
    char *text;
    int status = child_run(NULL, c->argv, &text, error);
    td_json_document *document = !status && text ? td_json_parse(b->td, text, strlen(text), c->argv[1]) : NULL;
    if (!status && !document) snprintf(error, ERROR_ROOM, "%.40s printed no result: %.200s", c->argv[1], td_error_text(b->td));
    else if (!status) error[0] = 0; /* warnings */
    td_clear_error(b->td);
    free(text);
    return document;
}

/* ---- Measuring */

static figures figures_of(const td_json *times, const td_json *root, const char *peak)
{
    double none = (double)NAN;
    return (figures){ .items_per_s = td_json_get_number(times, "items_per_s", none), .step_ms = td_json_get_number(times, "step_ms", none),
                      .peak_bytes = td_json_get_number(root, peak, none),
                      .comm_bytes = td_json_get_number(root, "comm_bytes_per_step", none),
                      .exposed_ms = td_json_get_number(times, "exposed_comm_ms", none),
                      .own_plan_bytes = td_json_get_number(root, "planned_peak_bytes", none) };
}

static void foretell(bench *b, cell *c)
{
    command plan;
    char error[ERROR_ROOM];
    begin(b, c, "plan", "--world", &plan);
    add(&plan, "--machine");
    add(&plan, b->machine);
    td_json_document *document = ask(b, &plan, error);
    const td_json *root = td_json_root(document);
    if (document) c->planned = figures_of(td_json_get(root, "estimate"), root, "planned_peak_bytes");
    td_json_close(document);
}

void cell_measure(bench *b, cell *c)
{
    command timed;
    begin(b, c, "bench", "--ranks", &timed);
    if (b->steps) add_number(&timed, "--steps", b->steps);
    if (b->rehearses && c->ranks > 1) add(&timed, "--rehearse"), add(&timed, "--machine"), add(&timed, b->machine);
    td_json_document *document = ask(b, &timed, c->error);
    const td_json *root = td_json_root(document);
    if (document) c->measured = figures_of(root, root, "peak_bytes");
    td_json_close(document);
    c->done = true;
    const cell *one = cells_baseline(b);
    if (!*c->error && one) c->efficiency = c->measured.items_per_s / (one->measured.items_per_s * c->ranks);
    if (!*c->error && !child_stopped()) foretell(b, c);
}

/* ---- Training */

static int read_losses(bench *b, const char *path, double *losses, int room)
{
    FILE *from = fopen(path, "r");
    char *line = NULL;
    size_t size = 0;
    int count = 0;
    while (from && count < room && getline(&line, &size, from) > 0) {
        td_json_document *document = td_json_parse(b->td, line, strlen(line), path);
        const td_json *loss = document ? td_json_get(td_json_root(document), "loss") : NULL;
        if (loss && loss->kind == TD_JSON_NUMBER) losses[count++] = loss->number;
        td_json_close(document);
        td_clear_error(b->td);
    }
    free(line);
    if (from) fclose(from);
    return count;
}

int cell_train(bench *b, cell *c, double *losses, int room)
{
    command train;
    char path[PATH_ROOM];
    begin(b, c, "train", "--ranks", &train);
    add_number(&train, "--steps", b->steps);
    add_number(&train, "--log-every", 1);
    add_number(&train, "--eval-batches", 1); /* what is compared is training */
    char *out = train.text[train.texts++];
    snprintf(out, sizeof train.text[0], "%s/check-%s-%d", b->out, c->strategy, c->ranks);
    for (char *at = strrchr(out, '/'); *at; at++)
        if (*at == ':') *at = '-';
    add(&train, "--out");
    add(&train, out);
    td_json_document *document = ask(b, &train, c->error);
    td_json_close(document);
    c->done = true;
    if (*c->error) return 0;
    snprintf(path, sizeof path, "%s/metrics.jsonl", out);
    int count = read_losses(b, path, losses, room);
    if (count < b->steps) snprintf(c->error, ERROR_ROOM, "%d losses of %d are in %.200s", count, b->steps, path);
    return *c->error ? 0 : count;
}
