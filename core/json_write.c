/* JSON, written (json.h has the promises).
 *
 * Numbers have a point whatever the program's locale says.
 */
#include "core/json.h"
#include "core/utf8.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void json_put(td_json_writer *w, const char *text, size_t bytes)
{
    if (w->failed) return;
    if (w->room - w->bytes < bytes + 1) {
        size_t room = 2 * w->room + bytes + 256;
        char *grown = td_alloc(w->td, room, "json");
        w->failed = grown == NULL;
        if (w->failed) return;
        if (w->text) memcpy(grown, w->text, w->bytes);
        td_free(w->td, w->text, w->room, "json");
        w->text = grown;
        w->room = room;
    }
    memcpy(w->text + w->bytes, text, bytes);
    w->bytes += bytes;
    w->text[w->bytes] = 0;
}

static void json_put_quoted(td_json_writer *w, const char *text)
{
    const uint8_t *s = (const uint8_t *)text;
    size_t left = strlen(text);
    json_put(w, "\"", 1);
    while (left > 0) {
        bool valid;
        size_t step = (size_t)td_utf8_step(s, (int64_t)left, &valid), length = valid ? step : 1;
        char escape[8];
        if (!valid) json_put(w, "\xEF\xBF\xBD", 3);
        else if (*s == '"' || *s == '\\') json_put(w, (char[]){ '\\', (char)*s }, 2);
        else if (*s == '\n') json_put(w, "\\n", 2);
        else if (*s == '\t') json_put(w, "\\t", 2);
        else if (*s < 0x20 || *s == 0x7F) json_put(w, escape, (size_t)snprintf(escape, sizeof escape, "\\u%04x", *s));
        else json_put(w, (const char *)s, length);
        s += length;
        left -= length;
    }
    json_put(w, "\"", 1);
}

/* What stands before every value: a comma, the member's name. */
static void json_put_before(td_json_writer *w, const char *name)
{
    if (w->follows) json_put(w, ",", 1);
    if (name) json_put_quoted(w, name);
    if (name) json_put(w, ":", 1);
    w->follows = true;
}

static void json_put_bare(td_json_writer *w, const char *name, const char *text)
{
    json_put_before(w, name);
    json_put(w, text, strlen(text));
}

td_json_writer td_json_begin(td_context *td)
{
    return (td_json_writer){ .td = td };
}

void td_json_open_object(td_json_writer *w, const char *name)
{
    json_put_bare(w, name, "{");
    w->follows = false;
}

void td_json_close_object(td_json_writer *w)
{
    json_put(w, "}", 1);
    w->follows = true;
}

void td_json_open_array(td_json_writer *w, const char *name)
{
    json_put_bare(w, name, "[");
    w->follows = false;
}

void td_json_close_array(td_json_writer *w)
{
    json_put(w, "]", 1);
    w->follows = true;
}

void td_json_put_string(td_json_writer *w, const char *name, const char *value)
{
    if (!value) {
        td_json_put_null(w, name);
        return;
    }
    json_put_before(w, name);
    json_put_quoted(w, value);
}

void td_json_put_number(td_json_writer *w, const char *name, double value)
{
    if (!isfinite(value)) {
        td_json_put_null(w, name);
        return;
    }
    char text[64], *out = text;
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    bool in_point = false;                               /* a locale's decimal point may be several bytes */
    for (const char *c = text; *c; c++) {
        bool plain = strchr("0123456789+-e", *c) != NULL;
        if (plain) *out++ = *c;
        else if (!in_point) *out++ = '.';
        in_point = !plain;
    }
    *out = 0;
    json_put_bare(w, name, text);
}

void td_json_put_integer(td_json_writer *w, const char *name, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    json_put_bare(w, name, text);
}

void td_json_put_unsigned(td_json_writer *w, const char *name, uint64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    json_put_bare(w, name, text);
}

void td_json_put_boolean(td_json_writer *w, const char *name, bool value)
{
    json_put_bare(w, name, value ? "true" : "false");
}

void td_json_put_null(td_json_writer *w, const char *name)
{
    json_put_bare(w, name, "null");
}

const char *td_json_text(const td_json_writer *w)
{
    return w->failed ? NULL : w->text;
}

void td_json_end(td_json_writer *w)
{
    td_free(w->td, w->text, w->room, "json");
    *w = (td_json_writer){ .td = w->td };
}
