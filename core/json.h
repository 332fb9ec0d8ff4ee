/* JSON: a reader that gives a tree, and a writer that builds text. RFC 8259; UTF-8 throughout.
 *
 * Reading is strict: no comments, nothing after the value, no name twice in one object, at most 64 levels deep.
 * Writing puts doubles with as many digits, from 15 on, as they need to read back equal, and NaN and infinities as null.
 */
#ifndef TANDEM_JSON_H
#define TANDEM_JSON_H

#include <tandem/core.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum td_json_kind {
    TD_JSON_NULL, TD_JSON_BOOLEAN, TD_JSON_NUMBER, TD_JSON_STRING, TD_JSON_ARRAY, TD_JSON_OBJECT
} td_json_kind;

/* One value of a document, owned by it. */
typedef struct td_json {
    td_json_kind kind;
    bool whole;                  /* number: written without fraction or exponent, and fits an int64_t */
    const char *name;            /* of a member of an object, else NULL */
    union {
        bool boolean;
        double number;           /* nearest double, also where `whole` */
        const char *string;      /* ends with 0, holds no other 0 */
        const struct td_json *first; /* child of an array or object; NULL when empty */
    };
    union {
        int64_t integer;         /* of a number that is whole */
        int64_t count;           /* children of an array or object */
    };
    const struct td_json *next;  /* sibling, in the order of the text */
} td_json;

typedef struct td_json_document td_json_document;

/* Parses `bytes` bytes of text; `source` names it in errors (a path) and is not kept. NULL and an error that gives
 * the line on failure. The document keeps nothing of `text`. */
TD_API td_json_document *td_json_parse(td_context *td, const char *text, size_t bytes, const char *source);
/* The same with the content of a file of at most 100 MB. */
TD_API td_json_document *td_json_read(td_context *td, const char *path);
TD_API void td_json_close(td_json_document *document);           /* NULL is allowed */
TD_API const td_json *td_json_root(const td_json_document *document);
/* The member of an object; NULL when there is none, or `object` is NULL or no object. */
TD_API const td_json *td_json_get(const td_json *object, const char *name);
/* The member's value where it is of the kind; else NULL or `otherwise`. */
TD_API const char *td_json_get_string(const td_json *object, const char *name);
TD_API int64_t td_json_get_whole(const td_json *object, const char *name, int64_t otherwise);
TD_API double td_json_get_number(const td_json *object, const char *name, double otherwise);

/* A text being built. `name` is the member's within an object and NULL elsewhere. After a failure (memory) the context
 * has an error, further calls do nothing and the text is NULL. Bytes of a string that are not UTF-8 become U+FFFD. */
typedef struct td_json_writer {
    td_context *td;
    char *text;
    size_t bytes, room;
    bool follows;                /* a value stands before the next one, on the same level */
    bool failed;
} td_json_writer;

TD_API td_json_writer td_json_begin(td_context *td);
TD_API void td_json_open_object(td_json_writer *w, const char *name);
TD_API void td_json_close_object(td_json_writer *w);
TD_API void td_json_open_array(td_json_writer *w, const char *name);
TD_API void td_json_close_array(td_json_writer *w);
TD_API void td_json_put_string(td_json_writer *w, const char *name, const char *value); /* NULL: null */
TD_API void td_json_put_number(td_json_writer *w, const char *name, double value);
TD_API void td_json_put_integer(td_json_writer *w, const char *name, int64_t value);
TD_API void td_json_put_unsigned(td_json_writer *w, const char *name, uint64_t value);
TD_API void td_json_put_boolean(td_json_writer *w, const char *name, bool value);
TD_API void td_json_put_null(td_json_writer *w, const char *name);
/* What was written, on one line; owned by the writer. NULL after a failure. */
TD_API const char *td_json_text(const td_json_writer *w);
TD_API void td_json_end(td_json_writer *w);                      /* frees the text */

#ifdef __cplusplus
}
#endif

#endif
