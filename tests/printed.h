/* What the last command (tests/shell.h) printed as JSON. */
#ifndef TANDEM_TESTS_PRINTED_H
#define TANDEM_TESTS_PRINTED_H

#include "core/json.h"
#include "tests/shell.h"

/* Its member, "estimate.step_ms" say: a number, or a boolean as 0 or 1. */
static inline CHECK_UNUSED double printed(const char *path)
{
    td_context *td = open_cpu(TD_F32);
    td_json_document *document = td_json_parse(td, out_text, strlen(out_text), "stdout");
    ck_assert_no_error(td);
    const td_json *at = td_json_root(document);
    char name[128], *rest;
    snprintf(name, sizeof name, "%s", path);
    for (char *part = strtok_r(name, ".", &rest); part; part = strtok_r(NULL, ".", &rest)) {
        at = td_json_get(at, part);
        ck_assert_msg(at != NULL, "no %s in %.900s", path, out_text);
    }
    ck_assert_msg(at->kind == TD_JSON_NUMBER || at->kind == TD_JSON_BOOLEAN, "%s is no number in %.900s", path, out_text);
    double number = at->kind == TD_JSON_NUMBER ? at->number : at->boolean;
    td_json_close(document);
    td_close(td);
    return number;
}

#endif
