/* gpt sample: text after a prompt, token by token, as it comes.
 *
 * Tokens are drawn as draw.h says, by random numbers keyed by the seed and the token's number: one seed gives one text.
 *
 * Keys and values of what was read are cached, so a token costs one row. When the context is full its last half is read again from
 * position 0, since what was computed at learned positions cannot move.
 */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/json.h"
#include "models/gpt/draw.h"
#include "models/gpt/gpt.h"

enum { ROWS = 64, PENDING = 256 }; /* rows of a step that reads: two plans serve all, this and one row */

typedef struct sampler {
    run_loop *run;
    td_context *td;
    gpt *gpt;
    data_tokenizer *tokenizer;
    gpt_caches caches;
    int64_t context, vocabulary;

    int32_t *ids;                 /* the prompt's and those drawn */
    int64_t count, room, prompt;
    int64_t shown;                /* the first that is text: a token between texts that begins this one is not */
    int64_t begin, cached;        /* ids[begin] is at position 0; so many from there on are in the caches */
    int32_t *rows, *places;       /* (1, context) */
    int32_t position, last;       /* of the first row; the row that is asked for */
    double *logits;               /* (vocabulary); read as the model's dtype */
    gpt_draw_options draw;
    gpt_choice *choices;          /* (vocabulary) */
    double uniform;               /* the draw */

    char pending[PENDING];        /* bytes that are no whole character yet */
    int64_t pending_bytes;
    double first_s, rest_s;       /* until the first token, and for the others */
} sampler;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- The prompt ------------------------------------------------------------------------------------------- */

static char *read_file(td_context *td, const char *path, size_t *bytes)
{
    char *text = NULL, part[1 << 14];
    FILE *from = fopen(path, "rb"), *to = from ? open_memstream(&text, bytes) : NULL;
    bool ok = to != NULL;
    for (size_t size; ok && (size = fread(part, 1, sizeof part, from)) > 0;) ok = fwrite(part, 1, size, to) == size;
    ok = ok && !ferror(from);
    if (!ok) td_fail(td, TD_ERROR_DATA, "cannot read %.400s: %s", path, strerror(errno));
    if (to && fclose(to)) td_fail(td, TD_ERROR_MEMORY, "out of memory for the prompt");
    if (from) fclose(from);
    if (td_error(td) == TD_OK) return text;
    free(text);
    return NULL;
}

static bool room_for(sampler *s, int64_t count)
{
    if (count <= s->room) return true;
    int32_t *grown = realloc(s->ids, (size_t)count * sizeof *grown);
    if (!grown) {
        td_fail(s->td, TD_ERROR_MEMORY, "out of memory for %lld tokens", (long long)count);
        return false;
    }
    s->ids = grown;
    s->room = count;
    return true;
}

static bool encode(sampler *s, const char *text, size_t bytes)
{
    int64_t count = data_tokenizer_encode(s->tokenizer, text, (int64_t)bytes, NULL, 0);
    if (count < 0 || !room_for(s, count + run_flag_whole(s->run, "tokens"))) return false;
    s->count = s->prompt = data_tokenizer_encode(s->tokenizer, text, (int64_t)bytes, s->ids, count);
    return s->count >= 0;
}

/* Where nothing is given a text begins as texts do: after the token between two of them, or after a line's end. */
static bool encode_beginning(sampler *s)
{
    static const char *const beginnings[] = { "<|endoftext|>", "<|begin_of_text|>", "\n" };
    for (int i = 0; i < 3; i++) {
        int32_t id = data_tokenizer_token(s->tokenizer, beginnings[i]);
        if (id < 0) continue;
        if (!room_for(s, 1 + run_flag_whole(s->run, "tokens"))) return false;
        s->ids[s->count++] = id;
        s->prompt = s->shown = 1;
        return true;
    }
    td_fail(s->td, TD_ERROR_USAGE, "this tokenizer has no token that a text begins with: give a --prompt");
    return false;
}

static bool read_prompt(sampler *s)
{
    const char *prompt = run_flag_text(s->run, "prompt"), *path = run_flag_text(s->run, "prompt-file");
    size_t bytes = 0;
    if (prompt && path) {
        td_fail(s->td, TD_ERROR_USAGE, "--prompt and --prompt-file both say what the text begins with: give one of them");
        return false;
    }
    if (prompt) return encode(s, prompt, strlen(prompt));
    if (!path) return encode_beginning(s);
    char *text = read_file(s->td, path, &bytes);
    bool ok = text && (bytes ? encode(s, text, bytes) : encode_beginning(s));
    free(text);
    return ok;
}

/* ---- Logits ----------------------------------------------------------------------------------------------- */

/* Where the context is full, its last half is all there is. */
static void make_room(sampler *s)
{
    if (s->count - s->begin <= s->context) return;
    s->begin = s->count - (s->context + 1) / 2;
    s->cached = 0;
}

/* Behind what is to be read stand copies of one id: nothing that is asked for sees them. */
static int64_t fill_rows(sampler *s)
{
    int64_t left = s->count - s->begin - s->cached, rows = left == 1 ? 1 : ROWS < s->context ? ROWS : s->context;
    int64_t read = left < rows ? left : rows;
    for (int64_t i = 0; i < rows; i++) {
        int64_t place = s->cached + i;
        s->rows[i] = s->ids[s->begin + (i < read ? place : 0)];
        s->places[i] = (int32_t)(place < s->context ? place : s->context - 1);
    }
    s->position = (int32_t)s->cached;
    s->last = (int32_t)read - 1;
    s->cached += read;
    return rows;
}

/* The logits behind the last of the next rows, and a draw in [0, 1). */
static bool read_rows(sampler *s)
{
    td_context *td = s->td;
    int64_t rows = fill_rows(s);
    td_tensor ids = td_input(td, "ids", TD_I32, TD_SHAPE(1, rows), s->rows);
    td_tensor places = td_input(td, "places", TD_I32, TD_SHAPE(1, rows), s->places);
    td_tensor positions = td_input(td, "positions", TD_I32, TD_SHAPE(1), &s->position);
    td_tensor last = td_input(td, "last", TD_I32, TD_SHAPE(1), &s->last);
    td_tensor logits = gpt_logits_behind(s->gpt, &s->caches, ids, places, positions, last);
    td_tensor uniform = td_uniform(td, TD_SHAPE(1));
    td_keep(logits);
    td_keep(uniform);
    td_set_updates(td, s->count);
    if (!td_step(td) || !td_read(logits, s->logits)) return false;
    s->uniform = td_item(uniform);
    return td_error(td) == TD_OK;
}

/* Of the next token. */
static bool next_logits(sampler *s)
{
    make_room(s);
    if (run_flag_on(s->run, "no-cache")) s->cached = 0;
    do
        if (!read_rows(s)) return false;
    while (s->cached < s->count - s->begin);
    return true;
}

/* The next token; -1 after an error. */
static int32_t choose(sampler *s)
{
    if (td_float(s->td) == TD_F32) /* widened in place, from the end */
        for (int64_t i = s->vocabulary; i-- > 0;) {
            float narrow;
            memcpy(&narrow, (const char *)s->logits + i * (int64_t)sizeof narrow, sizeof narrow);
            s->logits[i] = narrow;
        }
    int32_t id = gpt_draw(s->logits, s->vocabulary, &s->draw, s->uniform, s->choices);
    if (id < 0) td_fail(s->td, TD_ERROR_NUMBER, "the model's logits are no numbers: its checkpoint is of no use");
    return id;
}

/* ---- The text --------------------------------------------------------------------------------------------- */

/* Of the bytes at the end of a text, how many begin a character that is not whole; Unicode 15, table 3-7. */
static int64_t incomplete(const char *text, int64_t bytes)
{
    for (int64_t back = 1; back <= 3 && back <= bytes; back++) {
        unsigned char c = (unsigned char)text[bytes - back];
        if (c < 0x80) return 0;
        if (c < 0xC0) continue;
        int64_t whole = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
        return back < whole ? back : 0;
    }
    return 0;
}

static bool print_bytes(sampler *s, int64_t bytes)
{
    bool ok = fwrite(s->pending, 1, (size_t)bytes, stdout) == (size_t)bytes && fflush(stdout) == 0;
    if (!ok) td_fail(s->td, TD_ERROR_DATA, "cannot write to stdout: %s", strerror(errno));
    s->pending_bytes -= bytes;
    memmove(s->pending, s->pending + bytes, (size_t)s->pending_bytes);
    return ok;
}

/* Prints the text of a token as far as it is whole characters; a token of more bytes than fit is printed at once. */
static bool print_token(sampler *s, int32_t id)
{
    int64_t size = data_tokenizer_decode(s->tokenizer, &id, 1, NULL, 0);
    if (size < 0) return false;
    if (s->pending_bytes + size > PENDING && !print_bytes(s, s->pending_bytes)) return false;
    char *text = size > PENDING ? malloc((size_t)size) : NULL;
    if (size > PENDING && !text) {
        td_fail(s->td, TD_ERROR_MEMORY, "out of memory for a token of %lld bytes", (long long)size);
        return false;
    }
    data_tokenizer_decode(s->tokenizer, &id, 1, text ? text : s->pending + s->pending_bytes, size);
    if (text) {
        bool ok = fwrite(text, 1, (size_t)size, stdout) == (size_t)size;
        free(text);
        return ok;
    }
    s->pending_bytes += size;
    return print_bytes(s, s->pending_bytes - incomplete(s->pending, s->pending_bytes));
}

static bool print_all(sampler *s, int64_t begin, int64_t end)
{
    bool ok = true;
    for (int64_t i = begin; ok && i < end; i++) ok = print_token(s, s->ids[i]);
    return ok;
}

static void put_report(sampler *s, td_json_writer *w, const char *text)
{
    int64_t drawn = s->count - s->prompt;
    td_json_put_string(w, "model", "gpt");
    td_json_put_string(w, "command", "sample");
    td_json_put_string(w, "dtype", run_flag_text(s->run, "dtype"));
    td_json_put_unsigned(w, "seed", td_seed(s->td));
    td_json_put_integer(w, "params", td_parameter_elements(s->td));
    td_json_put_integer(w, "prompt_tokens", s->prompt - s->shown);
    td_json_put_integer(w, "tokens", drawn);
    td_json_put_number(w, "first_token_ms", 1000 * s->first_s);
    td_json_put_number(w, "tokens_per_s", drawn > 1 ? (double)(drawn - 1) / s->rest_s : (double)NAN);
    td_json_put_integer(w, "plans", td_last_report(s->td).plans);
    td_json_put_integer(w, "planned_peak_bytes", td_last_report(s->td).peak_bytes);
    td_json_put_string(w, "text", text);
}

/* The whole text, the prompt included, in one object. */
static void print_object(sampler *s)
{
    int64_t bytes = data_tokenizer_decode(s->tokenizer, s->ids + s->shown, s->count - s->shown, NULL, 0);
    char *text = bytes < 0 ? NULL : malloc((size_t)bytes + 1);
    if (!text) {
        td_fail(s->td, TD_ERROR_MEMORY, "out of memory for the text");
        return;
    }
    data_tokenizer_decode(s->tokenizer, s->ids + s->shown, s->count - s->shown, text, bytes);
    text[bytes] = 0;
    td_json_writer w = td_json_begin(s->td);
    td_json_open_object(&w, NULL);
    put_report(s, &w, text);
    td_json_close_object(&w);
    const char *object = td_json_text(&w);
    if (object && (printf("%s\n", object) < 0 || fflush(stdout)))
        td_fail(s->td, TD_ERROR_DATA, "cannot write to stdout: %s", strerror(errno));
    td_json_end(&w);
    free(text);
}

static void print_end(sampler *s)
{
    int64_t drawn = s->count - s->prompt;
    if (!print_bytes(s, s->pending_bytes)) return;
    printf("\n");
    fflush(stdout);
    if (drawn > 1) fprintf(stderr, "%lld tokens: the first after %.1f ms, then %.0f a second\n", (long long)drawn, 1000 * s->first_s,
                           (double)(drawn - 1) / s->rest_s);
}

/* ---- A signal ends the text, not the middle of a line ----------------------------------------------------- */

static volatile sig_atomic_t came; /* a handler can reach nothing else */

static void note(int number) { came = number; }

static void on_signals(void (*handler)(int))
{
    static const int numbers[] = { SIGINT, SIGTERM };
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART | SA_RESETHAND };
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 2; i++) sigaction(numbers[i], &action, NULL);
}

/* ---- The whole -------------------------------------------------------------------------------------------- */

static bool open_sampler(sampler *s)
{
    size_t rows = (size_t)s->context, tokens = (size_t)s->vocabulary; /* of the model */
    s->tokenizer = gpt_tokenizer(s->run);
    if (!s->tokenizer) return false;
    int64_t known = data_tokenizer_vocabulary(s->tokenizer); /* what only fills the model's vocabulary up has no text */
    if (known < s->vocabulary) s->vocabulary = known;
    s->rows = malloc(2 * rows * sizeof *s->rows);
    s->logits = malloc(tokens * sizeof *s->logits);
    s->choices = malloc(tokens * sizeof *s->choices);
    if (!s->rows || !s->logits || !s->choices) {
        td_fail(s->td, TD_ERROR_MEMORY, "out of memory for sampling");
        return false;
    }
    s->places = s->rows + rows;
    if (!strcmp(run_flag_text(s->run, "dtype"), "bf16") && !gpt_narrow(s->gpt)) return false;
    gpt_caches_make(s->gpt, &s->caches, 1, s->context);
    return read_prompt(s);
}

static void close_sampler(sampler *s)
{
    data_tokenizer_close(s->tokenizer);
    free(s->ids);
    free(s->rows);
    free(s->logits);
    free(s->choices);
    free(s);
}

static bool draw_token(sampler *s)
{
    if (!next_logits(s)) return false;
    int32_t id = choose(s);
    if (id >= 0) s->ids[s->count++] = id;
    return id >= 0;
}

void gpt_sample(run_loop *run, void *model)
{
    td_context *td = run_context(run);
    sampler *s = calloc(1, sizeof *s);
    if (!s) {
        td_fail(td, TD_ERROR_MEMORY, "out of memory for sampling");
        return;
    }
    s->run = run;
    s->td = td;
    s->gpt = model;
    s->context = s->gpt->size.context;
    s->vocabulary = s->gpt->size.vocabulary;
    s->draw = (gpt_draw_options){ .temperature = run_flag_number(run, "temperature"), .top_k = run_flag_whole(run, "top-k"),
                                  .top_p = run_flag_number(run, "top-p") };
    td_set_mode(td, TD_EVAL);
    int64_t wanted = run_flag_whole(run, "tokens");
    bool json = run_flag_on(run, "json"), ok = open_sampler(s);
    on_signals(note);
    double begin = now();
    if (ok && !json) ok = print_all(s, s->shown, s->prompt);
    for (int64_t t = 0; ok && !came && t < wanted; t++) {
        ok = draw_token(s);
        if (t == 0) s->first_s = now() - begin;
        if (ok && !json) ok = print_all(s, s->count - 1, s->count);
    }
    s->rest_s = now() - begin - s->first_s;
    if (ok && json) print_object(s);
    else if (ok) print_end(s);
    close_sampler(s);
    on_signals(SIG_DFL);
    if (came) raise(came); /* the status is that of the signal */
}
