/* Parsing and checking of flags, from the command line and from JSON. */
#include "run/flags.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static bool flags_fail(run_flags *f, const char *format, ...) TD_PRINTF(2, 3);

static bool flags_fail(run_flags *f, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(f->error, sizeof f->error, format, arguments);
    va_end(arguments);
    return false;
}

static run_value *find_value(run_flags *f, const char *name)
{
    for (int i = 0; i < f->count; i++)
        if (!strcmp(f->values[i].flag->name, name)) return &f->values[i];
    return NULL;
}

static const run_value *find(const run_flags *f, const char *name) { return find_value((run_flags *)f, name); }

bool run_flags_add(run_flags *f, const run_flag *table)
{
    for (; table && table->name; table++) {
        run_value *value = find_value(f, table->name);
        if (!value && f->count == RUN_MAX_FLAGS) return flags_fail(f, "more than %d flags are declared", RUN_MAX_FLAGS);
        if (!value) value = &f->values[f->count++];
        free(value->text);
        *value = (run_value){ .flag = table };
        if (table->standard && !run_flags_set(f, table->name, table->standard, RUN_DEFAULT)) return false;
    }
    return true;
}

void run_flags_free(run_flags *f)
{
    for (int i = 0; i < f->count; i++) free(f->values[i].text);
    f->count = 0;
}

/* ---- Values */

static const struct {
    const char *what;         /* "--batch takes ..." */
    bool whole, list;
} kinds[] = {
    [RUN_SWITCH] = { "no value", false, false },
    [RUN_TEXT] = { "a text that is not empty", false, false },
    [RUN_CHOICE] = { "one of", false, false },
    [RUN_COUNT] = { "a whole number of at least 1", true, false },
    [RUN_COUNTS] = { "whole numbers of at least 1 with commas between them, as 1024,1024", true, true },
    [RUN_WHOLE] = { "a whole number of at least 0", true, false },
    [RUN_SEED] = { "a whole number of at least 0, below 2^64", true, false },
    [RUN_POSITIVE] = { "a number above 0", false, false },
    [RUN_AMOUNT] = { "a number of at least 0", false, false },
    [RUN_FRACTION] = { "a number from 0 to below 1", false, false },
};

static bool in_range(run_flag_kind kind, double x)
{
    switch (kind) {
    case RUN_COUNT: case RUN_COUNTS: return x >= 1;
    case RUN_POSITIVE: return x > 0;
    case RUN_FRACTION: return x >= 0 && x < 1;
    default: return x >= 0;
    }
}

/* One number at *at, up to the end or, in a list, a comma; *at then stands behind it. */
static bool number_fits(const run_flag *flag, const char **at)
{
    bool whole = kinds[flag->kind].whole;
    if (!**at || strchr(whole ? " \t\n\v\f\r+-" : " \t\n\v\f\r+", **at)) return false;
    char *end;
    errno = 0;
    uint64_t n = whole ? strtoull(*at, &end, 10) : 0;
    double x = whole ? (double)n : strtod(*at, &end);
    if (end == *at || errno == ERANGE || !isfinite(x) || (n > INT64_MAX && flag->kind != RUN_SEED)) return false;
    if (!in_range(flag->kind, x) || (flag->most > 0 && x > flag->most)) return false;
    if (*end == ',' && kinds[flag->kind].list) end++;
    else if (*end) return false;
    else { *at = end; return true; }
    *at = end;
    return *end != 0;         /* "8," is no list */
}

static bool is_choice(const char *choices, const char *text)
{
    size_t length = strcspn(text, "|");
    if (text[length]) return false;
    for (const char *at = choices; length && at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        if (!strncmp(at, text, length) && (at[length] == '|' || !at[length])) return true;
    return false;
}

static bool value_fits(const run_flag *flag, const char *text)
{
    switch (flag->kind) {
    case RUN_SWITCH: return !strcmp(text, "true") || !strcmp(text, "false");
    case RUN_TEXT: return *text != 0;
    case RUN_CHOICE: return is_choice(flag->choices, text);
    default: break;
    }
    const char *at = text;
    do
        if (!number_fits(flag, &at)) return false;
    while (*at);
    return true;
}

static bool fail_value(run_flags *f, const run_flag *flag, const char *text)
{
    char most[48] = "";
    if (flag->most > 0) snprintf(most, sizeof most, ", at most %.10g", flag->most);
    return flags_fail(f, "--%s takes %s%s%s%s, not '%.80s'", flag->name, kinds[flag->kind].what,
                      flag->choices ? " " : "", flag->choices ? flag->choices : "", most, text);
}

/* ---- Names */

enum { NAME_ROOM = 32 };

/* The edits between two names: insertions, deletions, replacements, and swaps of neighbours. */
static int distance(const char *a, const char *b)
{
    int m = (int)strlen(a), n = (int)strlen(b);
    if (m >= NAME_ROOM || n >= NAME_ROOM) return NAME_ROOM;
    int d[NAME_ROOM][NAME_ROOM];
    for (int i = 0; i <= m; i++) {
        for (int j = 0; j <= n; j++) {
            if (!i || !j) {
                d[i][j] = i + j;
                continue;
            }
            int best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            if (d[i - 1][j] + 1 < best) best = d[i - 1][j] + 1;
            if (d[i][j - 1] + 1 < best) best = d[i][j - 1] + 1;
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped && d[i - 2][j - 2] + 1 < best) best = d[i - 2][j - 2] + 1;
            d[i][j] = best;
        }
    }
    return d[m][n];
}

static bool applies(const run_flags *f, const run_flag *flag)
{
    return flag->commands ? flag->commands & f->command : f->command != RUN_PLOT;
}

static bool fail_unknown(run_flags *f, const char *name)
{
    const char *nearest = NULL;
    int least = 4;
    for (int i = 0; i < f->count; i++) {
        const char *other = f->values[i].flag->name;
        if (!applies(f, f->values[i].flag)) continue;
        int length = (int)strlen(name);
        int edits = length > 2 && !strncmp(other, name, (size_t)length) ? 1 : distance(name, other);
        if (edits < least && edits <= length / 2 && edits < (int)strlen(other)) least = edits, nearest = other;
    }
    if (nearest) return flags_fail(f, "unknown flag --%.40s: did you mean --%s?", name, nearest);
    return flags_fail(f, "unknown flag --%.40s: '%s --help' lists all", name, f->program);
}

bool run_flags_set(run_flags *f, const char *name, const char *text, run_source source)
{
    run_value *value = find_value(f, name);
    if (!value) return fail_unknown(f, name);
    if (!applies(f, value->flag) && source == RUN_GIVEN)
        return flags_fail(f, "--%s is no flag of '%s': leave it out, or see '%s --help'", name, f->program, f->program);
    if (!value_fits(value->flag, text)) return fail_value(f, value->flag, text);
    if (value->text && source < value->source) return true;
    char *copy = strdup(text);
    if (!copy) return flags_fail(f, "out of memory while reading flags");
    free(value->text);
    value->text = copy;
    value->source = source;
    return true;
}

void run_flags_unset(run_flags *f, const char *name)
{
    run_value *value = find_value(f, name);
    if (!value) return;
    free(value->text);
    value->text = NULL;
}

/* ---- The command line */

/* Handles argv[*i], which begins with "--"; *i moves over a value that stands apart. */
static bool parse_one(run_flags *f, int argc, char **argv, int *i)
{
    char name[64];
    const char *begin = argv[*i] + 2, *equals = strchr(begin, '=');
    size_t length = equals ? (size_t)(equals - begin) : strlen(begin);
    if (length >= sizeof name) length = sizeof name - 1;
    memcpy(name, begin, length);
    name[length] = 0;
    run_value *value = find_value(f, name);
    if (!value) return fail_unknown(f, name);
    if (value->flag->kind == RUN_SWITCH) {
        if (equals && strcmp(equals + 1, "true") && strcmp(equals + 1, "false"))
            return flags_fail(f, "--%s takes no value, not '%.80s': write --%s alone", name, equals + 1, name);
        return run_flags_set(f, name, equals ? equals + 1 : "true", RUN_GIVEN);
    }
    if (equals) return run_flags_set(f, name, equals + 1, RUN_GIVEN);
    if (*i + 1 >= argc || !strncmp(argv[*i + 1], "--", 2)) {
        const char *what = value->flag->choices ? value->flag->choices : kinds[value->flag->kind].what;
        return flags_fail(f, "--%s needs a value behind it: %s", name, what);
    }
    return run_flags_set(f, name, argv[++*i], RUN_GIVEN);
}

bool run_flags_parse(run_flags *f, int *argc, char **argv)
{
    int kept = *argc > 0;
    for (int i = 1; i < *argc; i++) {
        if (!strcmp(argv[i], "-h")) {
            if (!run_flags_set(f, "help", "true", RUN_GIVEN)) return false;
        } else if (strncmp(argv[i], "--", 2) || !argv[i][2]) {
            argv[kept++] = argv[i];
        } else if (!parse_one(f, *argc, argv, &i)) {
            return false;
        }
    }
    *argc = kept;
    return true;
}

/* ---- JSON */

static bool load_member(run_flags *f, const char *path, const td_json *member, run_source source)
{
    char number[40];
    const char *text = number;
    switch (member->kind) {
    case TD_JSON_STRING: text = member->string; break;
    case TD_JSON_BOOLEAN: text = member->boolean ? "true" : "false"; break;
    case TD_JSON_NULL: return true;
    case TD_JSON_NUMBER:
        if (member->whole) snprintf(number, sizeof number, "%lld", (long long)member->integer);
        else snprintf(number, sizeof number, "%.17g", member->number);
        break;
    default: return flags_fail(f, "%s: \"%.40s\" must be a text, a number, true or false", path, member->name);
    }
    if (run_flags_set(f, member->name, text, source)) return true;
    char reason[sizeof f->error];
    memcpy(reason, f->error, sizeof reason);
    return flags_fail(f, "%.200s: %.300s", path, reason);
}

bool run_flags_load(run_flags *f, const char *path, run_source source)
{
    td_context *td = td_open(NULL);
    td_json_document *document = td_json_read(td, path);
    const td_json *root = td_json_root(document);
    bool ok = document != NULL;
    if (!ok) flags_fail(f, "%.500s", td_error_text(td));
    else if (root->kind != TD_JSON_OBJECT) ok = flags_fail(f, "%s: must hold one JSON object of flags", path);
    else
        for (const td_json *member = root->first; ok && member; member = member->next)
            ok = load_member(f, path, member, source);
    td_json_close(document);
    td_close(td);
    return ok;
}

/* What says where a run's files are and whether it goes on is no part of what the run is, nor is what none of train, eval, bench and
 * plan takes. */
static bool is_of_the_run(const run_flag *flag)
{
    const char *name = flag->name;
    if (flag->commands && !(flag->commands & (RUN_TRAIN | RUN_EVAL | RUN_BENCH | RUN_PLAN))) return false;
    static const char *const others[] = { "out", "resume", "config", "json", "help", "world", "best", "plot", "profile", "machine", "host-ranks" };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(name, others[i])) return false;
    return true;
}

/* As a number where readers of JSON keep all its digits, else as text. */
static void put_seed(td_json_writer *to, const char *name, uint64_t seed)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)seed);
    if (seed <= INT64_MAX) td_json_put_unsigned(to, name, seed);
    else td_json_put_string(to, name, text);
}

void run_flags_put(const run_flags *f, td_json_writer *to)
{
    for (int i = 0; i < f->count; i++) {
        const run_value *value = &f->values[i];
        const char *name = value->flag->name;
        if (!value->text || !is_of_the_run(value->flag)) continue;
        switch (value->flag->kind) {
        case RUN_SWITCH: td_json_put_boolean(to, name, !strcmp(value->text, "true")); break;
        case RUN_COUNT: case RUN_WHOLE: td_json_put_integer(to, name, strtoll(value->text, NULL, 10)); break;
        case RUN_SEED: put_seed(to, name, strtoull(value->text, NULL, 10)); break;
        case RUN_POSITIVE:
        case RUN_AMOUNT:
        case RUN_FRACTION: td_json_put_number(to, name, strtod(value->text, NULL)); break;
        default: td_json_put_string(to, name, value->text); break;
        }
    }
}

/* ---- Reading */

const char *run_flags_text(const run_flags *f, const char *name)
{
    const run_value *value = find(f, name);
    return value ? value->text : NULL;
}

int64_t run_flags_whole(const run_flags *f, const char *name)
{
    const char *text = run_flags_text(f, name);
    return text ? (int64_t)strtoull(text, NULL, 10) : 0;
}

double run_flags_number(const run_flags *f, const char *name)
{
    const char *text = run_flags_text(f, name);
    return text ? strtod(text, NULL) : 0;
}

bool run_flags_on(const run_flags *f, const char *name)
{
    const char *text = run_flags_text(f, name);
    return text && !strcmp(text, "true");
}

const char *run_flags_standard(const run_flags *f, const char *name)
{
    const run_value *value = find(f, name);
    return value ? value->flag->standard : NULL;
}

run_source run_flags_source(const run_flags *f, const char *name)
{
    const run_value *value = find(f, name);
    return value ? value->source : RUN_DEFAULT;
}

/* ---- Help */

static void help_value(const run_flag *flag, char *to, size_t room)
{
    static const char *const words[] = {
        [RUN_SWITCH] = "", [RUN_TEXT] = "TEXT", [RUN_CHOICE] = "", [RUN_COUNT] = "N", [RUN_COUNTS] = "N,N,...",
        [RUN_WHOLE] = "N", [RUN_SEED] = "N", [RUN_POSITIVE] = "X", [RUN_AMOUNT] = "X", [RUN_FRACTION] = "P",
    };
    snprintf(to, room, "--%s %s", flag->name, flag->choices ? flag->choices : words[flag->kind]);
}

void run_flags_help(const run_flags *f, FILE *to)
{
    for (int i = 0; i < f->count; i++) {
        const run_flag *flag = f->values[i].flag;
        if (!applies(f, flag)) continue;
        char left[96];
        help_value(flag, left, sizeof left);
        const run_value *value = &f->values[i];
        bool has_default = value->text && value->source == RUN_DEFAULT && flag->kind != RUN_SWITCH;
        fprintf(to, "  %-34s %s", left, flag->help);
        if (has_default) fprintf(to, " (%s)", value->text);
        fprintf(to, "\n");
    }
}
