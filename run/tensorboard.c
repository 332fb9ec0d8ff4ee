/* OUT/events.out.tfevents.TIME.HOST: the curves of metrics.jsonl for TensorBoard, by rank 0.
 *
 * A file is TFRecords, each one a protobuf Event: first the file's version, then a SessionLog START at the step after
 * first_step, then the scalars of each logged update. A run that goes on begins a further file: readers take files in
 * the order of their names, and at a START forget what stands at its step and beyond, so that no step shows twice.
 *
 *     record       length (u64), its CRC, data, its CRC; little-endian
 *     CRC          CRC-32C, masked: rotated right by 15, plus 0xa282ead8
 *     Event        wall_time 1 (double), step 2 (int64), file_version 3 (string), summary 5, session_log 7
 *     Summary      value 1, repeated: tag 1 (string), simple_value 2 (float)
 *     SessionLog   status 1 (enum; START is 1)
 *
 * as in TensorFlow's core/lib/io/record_writer.h and core/util/event.proto.
 */
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "run/loop.h"

enum { SCALAR_ROOM = 64, EVENT_ROOM = SCALAR_ROOM * (8 + RUN_METRICS) };

/* ---- Protobuf */

typedef struct message {
    size_t bytes;
    unsigned char data[EVENT_ROOM];
} message;

enum { VARINT = 0, FIXED64 = 1, LENGTH = 2, FIXED32 = 5 }; /* wire types */

/* `bytes` bytes of x, the lowest first. */
static void put_fixed(message *m, uint64_t x, int bytes)
{
    for (int i = 0; i < bytes; i++) m->data[m->bytes++] = (unsigned char)(x >> 8 * i);
}

static void put_varint(message *m, uint64_t x)
{
    for (; x >= 128; x >>= 7) m->data[m->bytes++] = (unsigned char)(x | 128);
    m->data[m->bytes++] = (unsigned char)x;
}

static void put_key(message *m, int field, int wire) { put_varint(m, (uint64_t)(field << 3 | wire)); }

static void put_bytes(message *m, int field, const void *data, size_t bytes)
{
    put_key(m, field, LENGTH);
    put_varint(m, bytes);
    memcpy(m->data + m->bytes, data, bytes);
    m->bytes += bytes;
}

static void put_double(message *m, int field, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    put_key(m, field, FIXED64);
    put_fixed(m, bits, 8);
}

static void put_float(message *m, int field, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    put_key(m, field, FIXED32);
    put_fixed(m, bits, 4);
}

static message begin_event(int64_t step)
{
    struct timespec now;
    message event = { 0 };
    clock_gettime(CLOCK_REALTIME, &now);
    put_double(&event, 1, (double)now.tv_sec + 1e-9 * (double)now.tv_nsec);
    put_key(&event, 2, VARINT);
    put_varint(&event, (uint64_t)step);
    return event;
}

/* A number that is not known has no point. */
static void put_scalar(message *summary, const char *group, const char *name, double x)
{
    char tag[SCALAR_ROOM / 2 + 8];
    message value = { 0 };
    if (isnan(x)) return;
    snprintf(tag, sizeof tag, "%s%s", group, name);
    put_bytes(&value, 1, tag, strlen(tag));
    put_float(&value, 2, (float)x);
    put_bytes(summary, 1, value.data, value.bytes);
}

/* ---- Records */

static uint32_t masked_crc(const unsigned char *data, size_t bytes)
{
    uint32_t crc = UINT32_MAX;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0); /* Castagnoli, reflected */
    }
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

static bool write_event(run_loop *run, const message *event)
{
    message head = { 0 }, tail = { 0 };
    put_fixed(&head, event->bytes, 8);
    put_fixed(&head, masked_crc(head.data, 8), 4);
    put_fixed(&tail, masked_crc(event->data, event->bytes), 4);
    run_busy(run, true);
    bool ok = fwrite(head.data, 1, head.bytes, run->events) == head.bytes &&
              fwrite(event->data, 1, event->bytes, run->events) == event->bytes &&
              fwrite(tail.data, 1, tail.bytes, run->events) == tail.bytes && fflush(run->events) == 0;
    run_busy(run, false);
    if (!ok) td_fail(run->td, TD_ERROR_DATA, "cannot write TensorBoard's events in %s: %s", run->out, strerror(errno));
    return ok;
}

/* ---- Files */

/* The time in a name; -1: of no such file. */
static int64_t time_of(const char *name)
{
    if (!run_is_events(name)) return -1;
    return strtoll(name + sizeof RUN_EVENTS - 1, NULL, 10);
}

bool run_is_events(const char *name) { return !strncmp(name, RUN_EVENTS, sizeof RUN_EVENTS - 1); }

/* Now, or later than every file that is there, whatever the clock says: readers go by the names. */
static int64_t time_to_name(const run_loop *run)
{
    int64_t latest = (int64_t)time(NULL) - 1;
    DIR *dir = opendir(run->out);
    for (struct dirent *entry; dir && (entry = readdir(dir));)
        if (time_of(entry->d_name) > latest) latest = time_of(entry->d_name);
    if (dir) closedir(dir);
    return latest + 1;
}

static void host_name(char host[64])
{
    if (gethostname(host, 64) || !*host) snprintf(host, 64, "localhost");
    host[63] = 0;
    for (char *at = host; *at; at++)
        if (*at <= ' ' || *at == '/' || *at == 127) *at = '-';
}

bool run_events_open(run_loop *run)
{
    static const char version[] = "brain.Event:2";
    char path[RUN_PATH], host[64];
    host_name(host);
    if (!run_path(run->td, path, "%s/" RUN_EVENTS "%010lld.%s", run->out, (long long)time_to_name(run), host))
        return false;
    run->events = fopen(path, "wx");
    if (!run->events) {
        td_fail(run->td, TD_ERROR_DATA, "cannot write %s: %s", path, strerror(errno));
        return false;
    }
    message event = begin_event(0), start = begin_event(run->first_step + 1);
    put_bytes(&event, 3, version, sizeof version - 1);
    put_bytes(&start, 7, (const unsigned char[]){ 1 << 3 | VARINT, 1 }, 2);
    return write_event(run, &event) && write_event(run, &start);
}

bool run_events_step(run_loop *run, double items_per_s)
{
    const run_evaluation *e = &run->evaluation;
    int64_t step = run->read;
    message event = begin_event(step), summary = { 0 };
    put_scalar(&summary, "", "loss", run->loss);
    put_scalar(&summary, "", "lr", run->lr);
    put_scalar(&summary, "", "grad_norm", run->grad_norm);
    put_scalar(&summary, "", "items_per_s", items_per_s);
    for (int i = 0; e->set && e->step == step && i < e->count; i++)
        put_scalar(&summary, "eval/", e->name[i], e->value[i]);
    put_bytes(&event, 5, summary.data, summary.bytes);
    return write_event(run, &event);
}

void run_events_close(run_loop *run)
{
    if (run->events && fclose(run->events))
        td_fail(run->td, TD_ERROR_DATA, "cannot write TensorBoard's events in %s: %s", run->out, strerror(errno));
    run->events = NULL;
}
