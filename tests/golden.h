/* Reads the golden values of tests/golden/: text files, one array a line, as the scripts beside them write them:
 *
 *     name sizes,with,commas value value ...          ("-" for a scalar)
 *
 * Everything lives until the test ends. A missing file or name, or a line that is not whole, fails the test by name.
 */
#ifndef TANDEM_TESTS_GOLDEN_H
#define TANDEM_TESTS_GOLDEN_H

#include "tests/check.h"

typedef struct golden {
    const char *file;
    const char *text;
} golden;

typedef struct golden_array {
    td_shape shape;
    int64_t count;         /* elements */
    const double *values;  /* row-major */
} golden_array;

/* golden_open("classifier.txt") */
static inline CHECK_UNUSED golden golden_open(const char *file)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/tests/golden/%s", TANDEM_SOURCE, file);
    FILE *stream = fopen(path, "rb");
    ck_assert_msg(stream, "%s cannot be opened", path);
    ck_assert_int_eq(fseek(stream, 0, SEEK_END), 0);
    long bytes = ftell(stream);
    ck_assert_int_gt(bytes, 0);
    rewind(stream);
    char *text = check_alloc((size_t)bytes + 1);
    size_t got = fread(text, 1, (size_t)bytes, stream);
    fclose(stream);
    ck_assert_msg(got == (size_t)bytes, "%s cannot be read", path);
    return (golden){ file, text };
}

static inline CHECK_UNUSED const char *golden_line(golden g, const char *name)
{
    size_t length = strlen(name);
    const char *line = g.text;
    while (line && !(strncmp(line, name, length) == 0 && line[length] == ' ')) {
        line = strchr(line, '\n');
        if (line) line++;
    }
    return line ? line + length + 1 : NULL;
}

static inline CHECK_UNUSED golden_array golden_get(golden g, const char *name)
{
    const char *at = golden_line(g, name);
    ck_assert_msg(at, "%s has no array %s", g.file, name);
    golden_array array = { .count = 1 };
    if (*at == '-') {
        at++;
    } else {
        int64_t dims[TD_MAX_DIMS];
        int rank = 0;
        do {
            ck_assert_msg(rank < TD_MAX_DIMS, "%s: %s has too many dimensions", g.file, name);
            char *end;
            dims[rank] = strtoll(at + (rank > 0), &end, 10);
            array.count *= dims[rank++];
            at = end;
        } while (*at == ',');
        array.shape = td_shape_of(rank, dims);
    }
    double *values = check_alloc((size_t)array.count * sizeof *values);
    for (int64_t i = 0; i < array.count; i++) {
        char *end;
        ck_assert_msg(*at == ' ', "%s: %s has fewer values than its shape says", g.file, name);
        values[i] = strtod(at, &end);
        at = end;
    }
    ck_assert_msg(*at == '\n', "%s: %s has more values than its shape says", g.file, name);
    array.values = values;
    return array;
}

/* The array's elements in another dtype (f64, f32 or i32), for td_input, td_batch and td_state_write. */
static inline CHECK_UNUSED void *golden_as(golden_array array, td_dtype dtype)
{
    void *data = check_alloc((size_t)(array.count * td_dtype_size(dtype)));
    for (int64_t i = 0; i < array.count; i++) {
        double x = array.values[i];
        switch (dtype) {
        case TD_F64: ((double *)data)[i] = x; break;
        case TD_F32: ((float *)data)[i] = (float)x; break;
        case TD_I32: ((int32_t *)data)[i] = (int32_t)x; break;
        default: ck_abort_msg("golden_as gives f64, f32 and i32, not %s", td_dtype_name(dtype));
        }
    }
    return data;
}

/* Writes the golden array prefix.KEY into the parameter KEY of td, for every parameter. */
static inline CHECK_UNUSED void golden_write_parameters(golden g, const char *prefix, td_context *td)
{
    for (int64_t i = 0; i < td_state_count(td); i++) {
        td_state s = td_state_at(td, i);
        if (td_state_kind_of(s) != TD_PARAMETER) continue;
        char name[256];
        snprintf(name, sizeof name, "%s.%s", prefix, td_state_name(s));
        golden_array array = golden_get(g, name);
        ck_assert_msg(td_shape_equal(array.shape, td_state_shape(s)), "%s: %s has another shape", g.file, name);
        ck_assert_msg(td_state_write(s, 0, array.count, golden_as(array, td_state_dtype(s))), "%s", td_error_text(td));
    }
}

/* Every f64 parameter KEY of td is near the golden array prefix.KEY, as ck_assert_near. */
static inline CHECK_UNUSED void golden_check_parameters(golden g, const char *prefix, td_context *td, double tolerance)
{
    for (int64_t i = 0; i < td_state_count(td); i++) {
        td_state s = td_state_at(td, i);
        if (td_state_kind_of(s) != TD_PARAMETER) continue;
        char name[256];
        snprintf(name, sizeof name, "%s.%s", prefix, td_state_name(s));
        golden_array array = golden_get(g, name);
        double *got = check_alloc((size_t)array.count * sizeof *got);
        ck_assert_int_eq(td_state_dtype(s), TD_F64);
        ck_assert_msg(td_state_read(s, 0, array.count, got), "%s", td_error_text(td));
        check_near(got, array.values, array.count, tolerance, name, g.file, 0);
    }
}

#endif
