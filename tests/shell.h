/* Programs as a user runs them: shell commands, their exit status and what they print.
 *
 * Commands run in SHELL_FOLDER, which is made, or where the test is. Set are $BIN, where the binaries are, $MLP, $GPT, $STRATEGIES and
 * $EXAMPLES there, $GOLDEN, the golden values, and $DATA, a name for data that the test makes.
 */
#ifndef TANDEM_TESTS_SHELL_H
#define TANDEM_TESTS_SHELL_H

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/check.h"

#ifndef SHELL_FOLDER
#define SHELL_FOLDER "."
#endif

/* stdout and stderr of the last command. */
static char out_text[1 << 16], err_text[1 << 14];

static inline void read_text(const char *path, char *to, size_t room)
{
    FILE *from = fopen(path, "r");
    ck_assert_msg(from != NULL, "%s: %s", path, strerror(errno));
    to[fread(to, 1, room - 1, from)] = 0;
    fclose(from);
}

/* Runs a command; returns its exit status. */
static inline int sh(const char *format, ...) TD_PRINTF(1, 2);
static inline int sh(const char *format, ...)
{
    static const char variables[] = "cd " SHELL_FOLDER " && BIN='" TANDEM_BIN "'; MLP=\"$BIN/mlp\"; GPT=\"$BIN/gpt\"; STRATEGIES=\"$BIN/strategies\"; "
                                    "EXAMPLES=\"$BIN/examples\"; GOLDEN='" TANDEM_SOURCE "/tests/golden'; DATA=data; ";
    char command[2048], whole[4096];
    va_list arguments;
    mkdir(SHELL_FOLDER, 0777);
    va_start(arguments, format);
    vsnprintf(command, sizeof command, format, arguments);
    va_end(arguments);
    ck_assert_int_lt(snprintf(whole, sizeof whole, "%s{ %s; } >stdout.txt 2>stderr.txt", variables, command), (int)sizeof whole);
    int status = system(whole);
    read_text(SHELL_FOLDER "/stdout.txt", out_text, sizeof out_text);
    read_text(SHELL_FOLDER "/stderr.txt", err_text, sizeof err_text);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The losses of a run's FOLDER/metrics.jsonl, which has each step once, in order: at most `room`. Returns how many. */
static inline CHECK_UNUSED int read_losses(const char *folder, double *losses, int room)
{
    char path[256], line[4096];
    int count = 0;
    snprintf(path, sizeof path, SHELL_FOLDER "/%s/metrics.jsonl", folder);
    FILE *from = fopen(path, "r");
    ck_assert_msg(from != NULL, "%s: %s", path, strerror(errno));
    while (fgets(line, sizeof line, from)) {
        const char *step = strstr(line, "\"step\":"), *loss = strstr(line, "\"loss\":");
        ck_assert_msg(step && loss && count < room && atoi(step + 7) == count + 1, "%s: line %d is %.200s", path, count + 1, line);
        losses[count++] = strtod(loss + 7, NULL);
    }
    fclose(from);
    return count;
}

#define ck_assert_sh(expected, ...)                                                                                    \
    do {                                                                                                               \
        int status_ = sh(__VA_ARGS__);                                                                                 \
        ck_assert_msg(status_ == (expected), "status %d, not %d; stderr: %.900s; stdout: %.900s", status_, (expected), \
                      err_text, out_text);                                                                             \
    } while (0)

#endif
