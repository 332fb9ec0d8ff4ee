/* Tokenizers by flag, and as a run keeps them.
 *
 * In OUT/model: characters.txt (the alphabet), or a tokenizer.json, or vocab.json and merges.txt, or none of them for bytes; and
 * tokens.json: {"kind": ..., "vocabulary": N, "fingerprint": ...}, to know another one by.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/file.h"
#include "core/json.h"
#include "models/gpt/published.h"

static bool is_there(td_context *td, const char *dir, const char *name)
{
    char path[GPT_PATH];
    return gpt_path(td, path, dir, name) && access(path, F_OK) == 0;
}

/* ---- Opening */

static data_tokenizer *from_flag(run_loop *run)
{
    td_context *td = run_context(run);
    const char *kind = run_flag_text(run, "tokenizer");
    if (!strcmp(kind, "characters")) return data_tokenizer_characters_of(td, run_data(run));
    if (!strcmp(kind, "bytes")) return data_tokenizer_bytes(td);
    return data_tokenizer_open(td, kind);
}

static bool read_record(td_context *td, const char *dir, char fingerprint[32], char kind[32])
{
    char path[GPT_PATH];
    if (!gpt_path(td, path, dir, "tokens.json")) return false;
    td_json_document *document = td_json_read(td, path);
    const td_json *root = document ? td_json_root(document) : NULL;
    const char *text = td_json_get_string(root, "fingerprint"), *name = td_json_get_string(root, "kind");
    if (document && (!text || !name)) td_fail(td, TD_ERROR_DATA, "%.400s lacks \"kind\" or \"fingerprint\"", path);
    snprintf(fingerprint, 32, "%s", text ? text : "");
    snprintf(kind, 32, "%s", name ? name : "");
    td_json_close(document);
    return td_error(td) == TD_OK;
}

static void print_fingerprint(const data_tokenizer *tokenizer, char to[32])
{
    snprintf(to, 32, "%016llx", (unsigned long long)data_tokenizer_fingerprint(tokenizer));
}

/* What a run left in dir. An imported folder has no tokens.json, and is taken as it is. */
static data_tokenizer *from_run(run_loop *run, const char *dir)
{
    td_context *td = run_context(run);
    char path[GPT_PATH], want[32] = "", have[32], kind[32] = "";
    if (is_there(td, dir, "tokens.json") && !read_record(td, dir, want, kind)) return NULL;
    data_tokenizer *tokenizer = NULL;
    if (!strcmp(kind, "bytes")) tokenizer = data_tokenizer_bytes(td);
    else if (is_there(td, dir, "characters.txt") && gpt_path(td, path, dir, "characters.txt")) tokenizer = data_tokenizer_characters_of(td, path);
    else if (is_there(td, dir, "tokenizer.json") || is_there(td, dir, "vocab.json")) tokenizer = data_tokenizer_open(td, dir);
    else td_fail(td, TD_ERROR_DATA, "%.400s has no tokenizer: give the one the model was trained with as --tokenizer", dir);
    if (!tokenizer || !*want) return tokenizer;
    print_fingerprint(tokenizer, have);
    if (!strcmp(have, want)) return tokenizer;
    td_fail(td, TD_ERROR_DATA, "the tokenizer in %.400s is not the one the model was trained with: its fingerprint is %s, not %s", dir, have, want);
    data_tokenizer_close(tokenizer);
    return NULL;
}

/* --tokenizer beside a run's own: the same, or an error. Takes and returns the run's. */
static data_tokenizer *agreed(run_loop *run, data_tokenizer *own)
{
    data_tokenizer *given = own ? from_flag(run) : NULL;
    bool same = given && data_tokenizer_fingerprint(given) == data_tokenizer_fingerprint(own);
    if (given && !same)
        td_fail(run_context(run), TD_ERROR_USAGE, "--tokenizer %.300s, with %lld tokens, is not the one of %.300s, which has %lld: leave it out",
                run_flag_text(run, "tokenizer"), (long long)data_tokenizer_vocabulary(given), run_flag_text(run, "out"),
                (long long)data_tokenizer_vocabulary(own));
    data_tokenizer_close(given);
    if (same) return own;
    data_tokenizer_close(own);
    return NULL;
}

data_tokenizer *gpt_tokenizer(run_loop *run)
{
    td_context *td = run_context(run);
    char dir[GPT_PATH];
    if (td_error(td) != TD_OK) return NULL;
    if (!run_restores(run)) return from_flag(run);
    if (!gpt_path(td, dir, run_flag_text(run, "out"), "model")) return NULL;
    bool none = access(dir, F_OK) != 0, given = run_flag_given(run, "tokenizer");
    if (none && given) return from_flag(run);
    data_tokenizer *own = from_run(run, dir);
    return given ? agreed(run, own) : own;
}

int64_t gpt_vocabulary(run_loop *run, int64_t tokens)
{
    gpt_size size;
    if (!gpt_size_of(run, &size)) return -1;
    int64_t known = size.vocabulary ? size.vocabulary : tokens;
    if (known >= tokens) return known;
    td_fail(run_context(run), TD_ERROR_USAGE, "the model knows %lld tokens and the tokenizer has %lld: give a --vocabulary as large", (long long)known,
            (long long)tokens);
    return -1;
}

/* ---- Keeping */

typedef struct content {
    const char *data;
    int64_t bytes;
    FILE *from;                  /* NULL: data */
} content;

static bool put(int fd, const void *user)
{
    const content *c = user;
    char part[1 << 16];
    if (!c->from) return td_file_put(fd, c->data, c->bytes);
    for (size_t size; (size = fread(part, 1, sizeof part, c->from)) > 0;)
        if (!td_file_put(fd, part, (int64_t)size)) return false;
    return !ferror(c->from);
}

static bool write_file(td_context *td, const char *dir, const char *name, const char *text, int64_t bytes)
{
    char path[GPT_PATH];
    return gpt_path(td, path, dir, name) && td_file_replace(td, path, put, &(content){ .data = text, .bytes = bytes });
}

static bool copy_file(td_context *td, const char *from, const char *dir, const char *name)
{
    char path[GPT_PATH];
    content c = { .from = fopen(from, "rb") };
    if (!c.from) td_fail(td, TD_ERROR_DATA, "cannot read %.400s: %s", from, strerror(errno));
    bool ok = c.from && gpt_path(td, path, dir, name) && td_file_replace(td, path, put, &c);
    if (c.from) fclose(c.from);
    return ok;
}

/* The files that make a byte-level BPE: `from` is their folder, or a tokenizer.json. */
static bool copy_bpe(td_context *td, const char *from, const char *dir)
{
    static const char *const names[] = { "tokenizer.json", "vocab.json", "merges.txt" };
    char path[GPT_PATH];
    if (!is_there(td, from, ".")) return copy_file(td, from, dir, "tokenizer.json");
    for (int i = 0; i < 3; i++) {
        if (!is_there(td, from, names[i])) continue;
        if (!gpt_path(td, path, from, names[i]) || !copy_file(td, path, dir, names[i])) return false;
        if (i == 0) return true;
    }
    return td_error(td) == TD_OK;
}

static bool write_record(td_context *td, const data_tokenizer *tokenizer, const char *kind, const char *dir)
{
    char fingerprint[32];
    print_fingerprint(tokenizer, fingerprint);
    td_json_writer w = td_json_begin(td);
    td_json_open_object(&w, NULL);
    td_json_put_string(&w, "kind", kind);
    td_json_put_integer(&w, "vocabulary", data_tokenizer_vocabulary(tokenizer));
    td_json_put_string(&w, "fingerprint", fingerprint);
    td_json_close_object(&w);
    const char *text = td_json_text(&w);
    bool ok = text && write_file(td, dir, "tokens.json", text, (int64_t)strlen(text));
    td_json_end(&w);
    return ok;
}

bool gpt_record(run_loop *run, const char *dir)
{
    td_context *td = run_context(run);
    const char *kind = run_flag_text(run, "tokenizer");
    bool characters = !strcmp(kind, "characters"), bytes = !strcmp(kind, "bytes");
    data_tokenizer *tokenizer = gpt_tokenizer(run);
    bool ok = tokenizer != NULL;
    if (ok && characters) {
        int64_t size;
        const char *alphabet = data_tokenizer_alphabet(tokenizer, &size);
        ok = write_file(td, dir, "characters.txt", alphabet, size);
    } else if (ok && !bytes) {
        ok = copy_bpe(td, kind, dir);
    }
    ok = ok && write_record(td, tokenizer, characters ? "characters" : bytes ? "bytes" : "bpe", dir);
    data_tokenizer_close(tokenizer);
    return ok;
}

/* ---- Published ones */

static bool has_bpe(td_context *td, const char *dir)
{
    return is_there(td, dir, "tokenizer.json") || (is_there(td, dir, "vocab.json") && is_there(td, dir, "merges.txt"));
}

bool gpt_copy_tokenizer(td_context *td, const char *from, const char *dir)
{
    if (!has_bpe(td, from)) return td_error(td) == TD_OK;
    if (mkdir(dir, 0777) && errno != EEXIST) {
        td_fail(td, TD_ERROR_DATA, "cannot make directory %.400s: %s", dir, strerror(errno));
        return false;
    }
    return copy_bpe(td, from, dir);
}

bool gpt_has_tokenizer(run_loop *run)
{
    char dir[GPT_PATH];
    return run_flag_given(run, "tokenizer") ||
           (gpt_path(run_context(run), dir, run_flag_text(run, "out"), "model") && access(dir, F_OK) == 0);
}
