/* TensorBoard's event files as a reader finds them: framing, CRCs, protobuf, the numbers of metrics.jsonl, and what a
 * run that goes on has readers forget. Read by a reader of this test's own, and by TensorBoard where it is installed.
 */
#include <dirent.h>

#define SMALL_FOLDER "test_tensorboard_files"
#include "tests/small_run.h"

/* ---- A reader --------------------------------------------------------------------------------------------- */

enum { SCALARS = 512, FILES = 8, NAME_ROOM = 256 };

typedef struct scalar {
    int64_t step;
    char tag[32];
    float value;
} scalar;

typedef struct event {
    double wall_time;
    int64_t step;
    char file_version[32];
    int64_t session_status;       /* 0: none */
    int scalars;
} event;

typedef struct curves {
    scalar scalar[SCALARS];
    int count;
    int events;                   /* of the last file */
} curves;

/* CRC-32C, a byte at a time from a table made here. */
static uint32_t crc32c(const unsigned char *data, size_t bytes)
{
    uint32_t table[256], crc = 0xffffffffu;
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++) table[i] = table[i] & 1 ? 0x82f63b78u ^ table[i] >> 1 : table[i] >> 1;
    }
    for (size_t i = 0; i < bytes; i++) crc = table[(crc ^ data[i]) & 255] ^ crc >> 8;
    return ~crc;
}

static uint64_t fixed(const unsigned char *at, int bytes)
{
    uint64_t x = 0;
    for (int i = bytes; i-- > 0;) x = x << 8 | at[i];
    return x;
}

static uint32_t unmasked(uint32_t masked)
{
    uint32_t rotated = masked - 0xa282ead8u;
    return rotated >> 17 | rotated << 15;
}

static uint64_t varint(const unsigned char **at)
{
    uint64_t x = 0;
    for (int shift = 0;; shift += 7) {
        x |= (uint64_t)(**at & 127) << shift;
        if (*(*at)++ < 128) return x;
    }
}

/* A field of a message. */
typedef struct field {
    int number, wire;
    uint64_t bits;                /* of a number, or the length of `data` */
    const unsigned char *data;
} field;

static bool next_field(const unsigned char **at, const unsigned char *end, field *f)
{
    if (*at >= end) return false;
    uint64_t key = varint(at);
    *f = (field){ .number = (int)(key >> 3), .wire = (int)(key & 7) };
    size_t fixed_bytes = f->wire == 1 ? 8 : f->wire == 5 ? 4 : 0;
    if (f->wire == 0 || f->wire == 2) f->bits = varint(at);
    else f->bits = fixed(*at, (int)fixed_bytes);
    f->data = *at;
    *at += f->wire == 2 ? f->bits : fixed_bytes;
    ck_assert(*at <= end);
    return true;
}

static void read_value(curves *c, int64_t step, field value)
{
    scalar *s = &c->scalar[c->count++];
    ck_assert_int_lt(c->count, SCALARS);
    *s = (scalar){ .step = step };
    const unsigned char *at = value.data;
    for (field f; next_field(&at, value.data + value.bits, &f);) {
        ck_assert(f.number == 1 || f.number == 2);
        ck_assert_int_eq(f.wire, f.number == 1 ? 2 : 5);
        if (f.number == 1) snprintf(s->tag, sizeof s->tag, "%.*s", (int)f.bits, (const char *)f.data);
        else memcpy(&s->value, f.data, sizeof s->value);
    }
}

static event read_event(curves *c, const unsigned char *data, size_t bytes)
{
    event e = { 0 };
    const unsigned char *at = data;
    for (field f, inner; next_field(&at, data + bytes, &f);) {
        const unsigned char *in = f.data, *end = f.data + (f.wire == 2 ? f.bits : 0);
        switch (f.number) {
        case 1: memcpy(&e.wall_time, f.data, sizeof e.wall_time); break;
        case 2: e.step = (int64_t)f.bits; break;
        case 3: snprintf(e.file_version, sizeof e.file_version, "%.*s", (int)f.bits, (const char *)f.data); break;
        case 5:
            while (next_field(&in, end, &inner)) read_value(c, e.step, inner), e.scalars++;
            break;
        case 7:
            while (next_field(&in, end, &inner))
                if (inner.number == 1) e.session_status = (int64_t)inner.bits;
            break;
        default: ck_abort_msg("field %d of an event", f.number);
        }
    }
    return e;
}

/* As TensorBoard does: what stands at the step of a SessionLog START and beyond is not so. */
static void forget_from(curves *c, int64_t step)
{
    int kept = 0;
    for (int i = 0; i < c->count; i++)
        if (c->scalar[i].step < step) c->scalar[kept++] = c->scalar[i];
    c->count = kept;
}

static void read_file(curves *c, const char *path)
{
    static unsigned char data[1 << 16];
    FILE *from = fopen(path, "r");
    ck_assert_ptr_nonnull(from);
    size_t bytes = fread(data, 1, sizeof data, from);
    fclose(from);
    c->events = 0;
    for (size_t at = 0; at < bytes;) {
        ck_assert_uint_le(at + 12, bytes);
        size_t length = (size_t)fixed(data + at, 8);
        ck_assert_uint_eq(unmasked((uint32_t)fixed(data + at + 8, 4)), crc32c(data + at, 8));
        ck_assert_uint_le(at + 16 + length, bytes);
        ck_assert_uint_eq(unmasked((uint32_t)fixed(data + at + 12 + length, 4)), crc32c(data + at + 12, length));
        event e = read_event(c, data + at + 12, length);
        ck_assert(e.wall_time > 1e9 && e.wall_time < 1e11); /* seconds */
        ck_assert_str_eq(e.file_version, c->events == 0 ? "brain.Event:2" : "");
        ck_assert_int_eq(e.session_status, c->events == 1 ? 1 : 0);
        if (e.session_status) forget_from(c, e.step);
        at += 16 + length;
        c->events++;
    }
}

static int by_name(const void *a, const void *b) { return strcmp(a, b); }

/* The names of the event files, in their order. */
static int list_files(const char *out, char names[FILES][NAME_ROOM])
{
    int count = 0;
    DIR *dir = opendir(out);
    ck_assert_ptr_nonnull(dir);
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (!strstr(entry->d_name, "tfevents")) continue;
        ck_assert_int_lt(count, FILES);
        snprintf(names[count++], NAME_ROOM, "%s", entry->d_name);
    }
    closedir(dir);
    qsort(names, (size_t)count, sizeof *names, by_name);
    return count;
}

static const curves *read_curves(const char *out)
{
    static curves c;
    char names[FILES][NAME_ROOM], path[2 * NAME_ROOM];
    c = (curves){ 0 };
    int files = list_files(out, names);
    for (int i = 0; i < files; i++) {
        snprintf(path, sizeof path, "%s/%.255s", out, names[i]);
        read_file(&c, path);
    }
    return &c;
}

/* How often the tag stands at the step; *value: the last. */
static int find(const curves *c, int64_t step, const char *tag, float *value)
{
    int found = 0;
    for (int i = 0; i < c->count; i++) {
        if (c->scalar[i].step != step || strcmp(c->scalar[i].tag, tag)) continue;
        *value = c->scalar[i].value;
        found++;
    }
    return found;
}

/* Every number of metrics.jsonl is there once, as a float, and nothing else is. */
static void check_against_metrics(const char *out, int64_t lines)
{
    static const char *const tags[] = { "loss", "lr", "grad_norm", "items_per_s" };
    const curves *c = read_curves(out);
    char path[NAME_ROOM], line[1024];
    int scalars = 0;
    float value;
    snprintf(path, sizeof path, "%s/metrics.jsonl", out);
    ck_assert_int_eq(count_lines(path), lines);
    FILE *from = fopen(path, "r");
    td_context *td = open_cpu(TD_F32);
    while (fgets(line, sizeof line, from)) {
        td_json_document *document = td_json_parse(td, line, strlen(line), path);
        const td_json *root = td_json_root(document), *eval = td_json_get(root, "eval");
        int64_t step = td_json_get_whole(root, "step", -1);
        for (int i = 0; i < 4; i++, scalars++) {
            ck_assert_msg(find(c, step, tags[i], &value) == 1, "%s of step %d", tags[i], (int)step);
            ck_assert(value == (float)td_json_get_number(root, tags[i], (double)NAN));
        }
        if (eval) {
            ck_assert_int_eq(find(c, step, "eval/loss", &value), 1);
            ck_assert(value == (float)td_json_get_number(eval, "loss", (double)NAN));
            scalars++;
        }
        td_json_close(document);
    }
    ck_assert_int_eq(c->count, scalars);
    td_close(td);
    fclose(from);
}

static int train_evaluated(const char *flags)
{
    return loop_small(open_small(flags), adamw, 5, NULL, NULL, measure_loss);
}

/* ---- What stands there ------------------------------------------------------------------------------------ */

/* The reader's own sum: the check value of CRC-32C (Iscsi) in the catalogues. */
START_TEST(test_the_checksum_is_crc_32c)
{
    ck_assert_uint_eq(crc32c((const unsigned char *)"123456789", 9), 0xe3069283u);
}
END_TEST

START_TEST(test_events_hold_what_metrics_hold)
{
    clean("same");
    ck_assert_int_eq(train_evaluated("--steps 7 --log-every 1 --eval-every 3 --schedule cosine --warmup 2 --out same"), 0);
    check_against_metrics("same", 7);
    ck_assert_int_eq(read_curves("same")->events, 2 + 7);
}
END_TEST

/* Without a gradient's norm there is no point, and no NaN. */
START_TEST(test_what_is_not_known_has_no_point)
{
    float value;
    clean("sparse");
    ck_assert_int_eq(train_by(plain_sgd, "--steps 3 --log-every 1 --out sparse", 5, NULL, NULL), 0);
    const curves *c = read_curves("sparse");
    ck_assert_int_eq(find(c, 3, "loss", &value), 1);
    ck_assert_int_eq(find(c, 3, "grad_norm", &value), 0);
    ck_assert_int_eq(c->count, 3 * 3);
}
END_TEST

START_TEST(test_a_run_that_goes_on_shows_no_step_twice)
{
    char names[FILES][NAME_ROOM];
    td_context *td = open_cpu(TD_F32);
    clean("on");
    ck_assert_int_eq(train_evaluated("--steps 6 --save-every 4 --log-every 1 --eval-every 2 --out on"), 0);
    ck_assert(run_remove_tree(td, "on/checkpoints/step-6")); /* as if it had been killed before */
    ck_assert_int_eq(train_evaluated("--steps 9 --resume --out on"), 0);
    ck_assert_int_eq(list_files("on", names), 2);
    check_against_metrics("on", 9);
    ck_assert_int_eq(read_curves("on")->events, 2 + 5); /* of the further file: steps 5 to 9 */
    /* a clock that goes back does not put a file before those it follows */
    write_text("on/events.out.tfevents.9999999998.elsewhere", "");
    ck_assert_int_eq(train_evaluated("--steps 10 --resume --out on"), 0);
    ck_assert_int_eq(list_files("on", names), 4);
    ck_assert_msg(!strncmp(names[3], "events.out.tfevents.9999999999.", 31), "%s", names[3]);
    td_close(td);
}
END_TEST

START_TEST(test_events_of_another_run_are_moved_aside)
{
    char names[FILES][NAME_ROOM];
    clean("aside");
    ck_assert_int_eq(train_evaluated("--steps 3 --log-every 1 --out aside"), 0);
    ck_assert_int_eq(train_evaluated("--steps 4 --log-every 1 --resume --out aside"), 0);
    ck_assert_int_eq(train_evaluated("--steps 2 --log-every 1 --out aside"), 0);
    ck_assert_int_eq(list_files("aside", names), 1);
    check_against_metrics("aside", 2);
    ck_assert_int_eq(list_files("aside/previous-1", names), 2);
    check_against_metrics("aside/previous-1", 4);
}
END_TEST

/* ---- TensorBoard itself ----------------------------------------------------------------------------------- */

/* Its accumulator's scalars and its loader's, of a run that went on, are those of metrics.jsonl. */
START_TEST(test_tensorboard_reads_the_same)
{
    if (system("python3 -c 'import tensorboard' 2>/dev/null") != 0)
        SKIP("Python's package tensorboard is not installed");
    td_context *td = open_cpu(TD_F32);
    clean("board");
    ck_assert_int_eq(train_evaluated("--steps 6 --save-every 4 --log-every 1 --eval-every 2 --out board"), 0);
    ck_assert(run_remove_tree(td, "board/checkpoints/step-6"));
    ck_assert_int_eq(train_evaluated("--steps 9 --resume --out board"), 0);
    td_close(td);
    ck_assert_int_eq(system("python3 -c '\n"
                            "import glob, json, struct\n"
                            "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
                            "from tensorboard.backend.event_processing.event_file_loader import EventFileLoader\n"
                            "f32 = lambda x: struct.unpack(\"f\", struct.pack(\"f\", x))[0]\n"
                            "want = {}\n"
                            "for line in open(\"board/metrics.jsonl\"):\n"
                            "    o = json.loads(line)\n"
                            "    values = {t: o[t] for t in (\"loss\", \"lr\", \"grad_norm\", \"items_per_s\")}\n"
                            "    values.update({\"eval/\" + t: x for t, x in o.get(\"eval\", {}).items()})\n"
                            "    for tag, x in values.items(): want.setdefault(tag, []).append((o[\"step\"], f32(x)))\n"
                            "read = EventAccumulator(\"board\", size_guidance={\"scalars\": 0})\n"
                            "read.Reload()\n"
                            "got = {t: [(e.step, e.value) for e in read.Scalars(t)] for t in read.Tags()[\"scalars\"]}\n"
                            "assert got == want, (got, want)\n"
                            "assert [len(got[t]) for t in (\"loss\", \"eval/loss\")] == [9, 5], got\n"
                            "events = [e for p in sorted(glob.glob(\"board/*tfevents*\")) for e in EventFileLoader(p).Load()]\n"
                            "assert len(events) == 2 + 6 + 2 + 5, events\n"
                            "assert events[0].file_version == \"brain.Event:2\" and events[9].session_log.status == 1\n"
                            "' 2>tensorboard.txt"),
                     0);
}
END_TEST

TESTS("tensorboard", test_the_checksum_is_crc_32c, test_events_hold_what_metrics_hold,
      test_what_is_not_known_has_no_point, test_a_run_that_goes_on_shows_no_step_twice,
      test_events_of_another_run_are_moved_aside, test_tensorboard_reads_the_same)
