/* Ranks near their GPUs: lists of CPUs as the kernel writes them, the shares of ranks at one node, what is left as it is, and that threads
 * inherit where their rank is. What sysfs says is a folder of the test's.
 */
#define SHELL_FOLDER "near"
#include <omp.h>
#include <pthread.h>
#include <unistd.h>

#include "parallel/near.h"
#include "tests/shell.h"

/* ---- Lists ----------------------------------------------------------------------------------------------- */

static cpu_set_t cpus_of(const char *list)
{
    cpu_set_t cpus;
    ck_assert_msg(par_cpus_read(list, &cpus), "'%s'", list);
    return cpus;
}

static const char *text_of(const cpu_set_t *cpus)
{
    char *text = check_alloc(256);
    par_cpus_text(cpus, text, 256);
    return text;
}

START_TEST(test_lists_are_read_and_written_as_the_kernel_does)
{
    static const struct { const char *list, *text; int count; } cases[] = {
        { "0-15,64-79", "0-15,64-79", 32 }, { "0-15,64-79\n", "0-15,64-79", 32 }, { "3", "3", 1 }, { "0,2,4-5\n", "0,2,4-5", 4 },
        { "", "", 0 }, { "\n", "", 0 }, { "1023", "1023", 1 }, { "7,6", "6-7", 2 }, { "0-1023", "0-1023", 1024 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        cpu_set_t cpus = cpus_of(cases[i].list);
        ck_assert_int_eq(CPU_COUNT(&cpus), cases[i].count);
        ck_assert_str_eq(text_of(&cpus), cases[i].text);
    }
}
END_TEST

START_TEST(test_what_is_no_list_is_refused)
{
    static const char *const lists[] = {
        "a", "-", "3-", "-3", "3,", ",3", "3,,4", "5-2", "3 4", " 3", "+3", "0-7:1/2", "0-3\n\n", "1024", "0-1024", "99999999999999999999",
    };
    cpu_set_t cpus;
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) ck_assert_msg(!par_cpus_read(lists[i], &cpus), "'%s'", lists[i]);
}
END_TEST

START_TEST(test_a_text_without_room_is_cut)
{
    cpu_set_t cpus = cpus_of("0,2,4,6,8-99");
    char text[12];
    for (size_t room = 8; room <= 10; room++) { /* of "0,2,4,6,8-99" */
        par_cpus_text(&cpus, text, room);
        ck_assert_str_eq(text, "0,2,4,6");
    }
}
END_TEST

/* ---- Shares ---------------------------------------------------------------------------------------------- */

/* `cores` cores of `wide` CPUs each: CPU c is of core c % cores. */
static void check_shares(int cores, int wide, int parts)
{
    cpu_set_t all, share;
    int first[CPU_SETSIZE], taken[CPU_SETSIZE] = { 0 };
    CPU_ZERO(&all);
    for (int c = 0; c < CPU_SETSIZE; c++) first[c] = c % cores;
    for (int c = 0; c < cores * wide; c++) CPU_SET(c, &all);
    for (int k = 0; k < parts; k++) {
        ck_assert(par_cpus_share(&all, first, k, parts, &share));
        ck_assert_int_eq(CPU_COUNT(&share), wide * (cores / parts + (k < cores % parts)));
        for (int c = 0; c < CPU_SETSIZE; c++) {
            taken[c] += CPU_ISSET(c, &share);
            if (c < cores * wide) ck_assert_int_eq(CPU_ISSET(c, &share), CPU_ISSET(c % cores, &share)); /* cores are whole */
        }
    }
    for (int c = 0; c < CPU_SETSIZE; c++) ck_assert_int_eq(taken[c], c < cores * wide);
}

START_TEST(test_shares_have_each_core_once)
{
    for (int cores = 1; cores <= 25; cores++)
        for (int parts = 1; parts <= cores; parts++)
            for (int wide = 1; wide <= 2; wide++) check_shares(cores, wide, parts);
}
END_TEST

START_TEST(test_more_ranks_than_cores_share_all)
{
    cpu_set_t all = cpus_of("4-5,12-13"), share;
    int first[CPU_SETSIZE] = { [4] = 4, [5] = 5, [12] = 4, [13] = 5 };
    for (int k = 0; k < 3; k++) {
        ck_assert(!par_cpus_share(&all, first, k, 3, &share));
        ck_assert_str_eq(text_of(&share), "4-5,12-13");
    }
}
END_TEST

/* ---- A host ---------------------------------------------------------------------------------------------- */

/* Two nodes of 4 cores with 2 CPUs each, and two GPUs at each node. */
static par_near_host two_nodes(int ranks)
{
    par_near_host host = { .sysfs = SHELL_FOLDER "/sys", .ranks = ranks,
                           .address = { "0000:1B:00.0", "00000000:3B:00.0", "0001:9B:00.0", "0001:BB:00.1" } };
    ck_assert_sh(0, "rm -rf sys; mkdir -p sys/devices/system/cpu; cd sys/devices/system/cpu; echo 0-15 >online; for c in 0 1 2 3 4 5 6 7; do "
                    "for s in $c $((c + 8)); do mkdir -p cpu$s/topology; echo $c,$((c + 8)) >cpu$s/topology/thread_siblings_list; done; done");
    ck_assert_sh(0, "mkdir -p sys/bus/pci/devices; cd sys/bus/pci/devices; mkdir 0000:1b:00.0 0000:3b:00.0 0001:9b:00.0 0001:bb:00.1; "
                    "for g in 0000:*; do echo 0-3,8-11 >$g/local_cpulist; done; for g in 0001:*; do echo 4-7,12-15 >$g/local_cpulist; done");
    return host;
}

static void check_kept(const par_near_host *host, int index, const char *expected)
{
    cpu_set_t all = cpus_of("0-15"), near;
    bool own;
    ck_assert(par_near_find(host, index, &all, &near, &own));
    ck_assert_str_eq(text_of(&near), expected);
    ck_assert(own);
}

static void check_left(const par_near_host *host, int index, const char *allowed)
{
    cpu_set_t mask = cpus_of(allowed), near;
    bool own;
    ck_assert_msg(!par_near_find(host, index, &mask, &near, &own), "on %s of %s", text_of(&near), allowed);
}

START_TEST(test_ranks_at_a_node_share_its_cores)
{
    par_near_host four = two_nodes(4), three = two_nodes(3);
    check_kept(&four, 0, "0-1,8-9");
    check_kept(&four, 1, "2-3,10-11");
    check_kept(&four, 2, "4-5,12-13");
    check_kept(&four, 3, "6-7,14-15");
    check_kept(&three, 1, "2-3,10-11");
    check_kept(&three, 2, "4-7,12-15"); /* alone there */
}
END_TEST

START_TEST(test_without_a_word_on_cores_each_cpu_is_one)
{
    par_near_host host = two_nodes(4);
    ck_assert_sh(0, "rm -r sys/devices/system/cpu/cpu*");
    check_kept(&host, 0, "0-3");
    check_kept(&host, 1, "8-11");
}
END_TEST

START_TEST(test_what_somebody_has_chosen_is_left)
{
    par_near_host host = two_nodes(4);
    check_left(&host, 0, "0-7");
    check_left(&host, 0, "0-3,8-11");
    check_left(&host, 0, "0-14");
    check_left(&host, 2, "1-15");
}
END_TEST

START_TEST(test_what_is_not_known_or_all_as_near_is_left)
{
    par_near_host host = two_nodes(4);
    ck_assert_sh(0, "cd sys/bus/pci/devices; echo 0-15 >0000:1b:00.0/local_cpulist; rm 0000:3b:00.0/local_cpulist; echo >0001:9b:00.0/local_cpulist");
    check_left(&host, 0, "0-15"); /* one node */
    check_left(&host, 1, "0-15"); /* no file */
    check_left(&host, 2, "0-15"); /* near none */
    check_kept(&host, 3, "4-7,12-15");
    host.address[3][0] = 0;
    check_left(&host, 3, "0-15");
    host = two_nodes(4);
    ck_assert_sh(0, "echo none >sys/bus/pci/devices/0000:1b:00.0/local_cpulist");
    check_left(&host, 0, "0-15");
    ck_assert_sh(0, "rm sys/devices/system/cpu/online");
    check_left(&host, 1, "0-15");
}
END_TEST

/* ---- This process ---------------------------------------------------------------------------------------- */

/* Of this machine: the first CPU is near rank 0's GPU, the others near rank 1's. */
static par_near_host this_machine(const cpu_set_t *all, cpu_set_t *rest)
{
    par_near_host host = { .sysfs = SHELL_FOLDER "/sys", .ranks = 2, .address = { "0000:01:00.0", "0000:02:00.0" } };
    int first = 0;
    while (!CPU_ISSET(first, all)) first++;
    *rest = *all;
    CPU_CLR(first, rest);
    ck_assert_sh(0, "rm -rf sys; mkdir -p sys/devices/system/cpu sys/bus/pci/devices/0000:01:00.0 sys/bus/pci/devices/0000:02:00.0; "
                    "echo %s >sys/devices/system/cpu/online; cd sys/bus/pci/devices; echo %d >0000:01:00.0/local_cpulist; "
                    "echo %s >0000:02:00.0/local_cpulist",
                 text_of(all), first, text_of(rest));
    return host;
}

static void *note_cpus(void *to)
{
    sched_getaffinity(0, sizeof(cpu_set_t), to);
    return NULL;
}

static void check_is_on(const cpu_set_t *cpus)
{
    cpu_set_t here;
    note_cpus(&here);
    ck_assert_str_eq(text_of(&here), text_of(cpus));
}

/* In the only test that has OpenMP's threads: once they are there they stay. */
static void check_threads_are_on(const cpu_set_t *cpus)
{
    cpu_set_t started, team;
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, note_cpus, &started), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_str_eq(text_of(&started), text_of(cpus));
    CPU_ZERO(&team);
#pragma omp parallel num_threads(2)
    if (omp_get_thread_num() == 1) note_cpus(&team);
    ck_assert_str_eq(text_of(&team), text_of(cpus));
}

START_TEST(test_threads_stay_where_their_rank_is)
{
    cpu_set_t all, rest;
    char message[256], expected[320];
    ck_assert_int_eq(sched_getaffinity(0, sizeof all, &all), 0);
    if (CPU_COUNT(&all) < 2) SKIP("one CPU");
    par_near_host host = this_machine(&all, &rest);
    par_world *world = par_world_threads(2, NULL);
    int threads = par_near_stay(world, 1, &host, 1, message, sizeof message);
    ck_assert_int_eq(threads, CPU_COUNT(&all) - 1);
    snprintf(expected, sizeof expected, "rank 1: on core%s %s, near its GPU", threads == 1 ? "" : "s", text_of(&rest));
    ck_assert_str_eq(message, expected);
    check_is_on(&rest);
    check_threads_are_on(&rest);
    ck_assert_int_eq(sched_setaffinity(0, sizeof all, &all), 0);
    par_world_close(world);
}
END_TEST

START_TEST(test_ranks_that_share_too_few_cores_have_a_thread_each)
{
    cpu_set_t all, rest;
    char message[256];
    ck_assert_int_eq(sched_getaffinity(0, sizeof all, &all), 0);
    if (CPU_COUNT(&all) < 2) SKIP("one CPU");
    if (CPU_COUNT(&all) > PAR_MAX_RANKS) SKIP("more CPUs than a world has ranks");
    par_near_host host = this_machine(&all, &rest);
    par_world *world = par_world_threads(2, NULL);
    host.ranks = CPU_COUNT(&all); /* at the node of the others, which are one fewer */
    for (int r = 0; r < host.ranks; r++) strcpy(host.address[r], "0000:02:00.0");
    ck_assert_int_eq(par_near_stay(world, 1, &host, 1, message, sizeof message), 1);
    check_is_on(&rest);
    ck_assert_int_eq(sched_setaffinity(0, sizeof all, &all), 0);
    par_world_close(world);
}
END_TEST

START_TEST(test_variables_that_place_threads_are_left_to)
{
    static const char *const names[] = { "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY" };
    cpu_set_t all, rest;
    char message[256];
    ck_assert_int_eq(sched_getaffinity(0, sizeof all, &all), 0);
    if (CPU_COUNT(&all) < 2) SKIP("one CPU");
    par_near_host host = this_machine(&all, &rest);
    par_world *world = par_world_threads(2, NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        setenv(names[i], "false", 1);
        ck_assert_int_eq(par_near_stay(world, 1, &host, 1, message, sizeof message), 0);
        ck_assert_str_eq(message, "");
        unsetenv(names[i]);
    }
    check_is_on(&all);
    par_world_close(world);
}
END_TEST

START_TEST(test_ranks_on_the_cpu_or_on_one_gpu_by_name_are_left)
{
    char message[256];
    cpu_set_t all;
    ck_assert_int_eq(sched_getaffinity(0, sizeof all, &all), 0);
    par_world *world = par_world_threads(2, NULL), *alone = par_world_threads(1, NULL);
    ck_assert_int_eq(par_near_gpu(world, 1, "cpu", message, sizeof message), 0);
    ck_assert_str_eq(message, "");
    ck_assert_int_eq(par_near_gpu(world, 1, "cuda:0", message, sizeof message), 0);
    ck_assert_str_eq(message, "");
    ck_assert_int_eq(par_near_gpu(alone, 0, "cuda", message, sizeof message), 0);
    ck_assert_str_eq(message, "");
    check_is_on(&all);
    par_world_close(world);
    par_world_close(alone);
}
END_TEST

TESTS("near", test_lists_are_read_and_written_as_the_kernel_does, test_what_is_no_list_is_refused, test_a_text_without_room_is_cut,
      test_shares_have_each_core_once, test_more_ranks_than_cores_share_all, test_ranks_at_a_node_share_its_cores,
      test_without_a_word_on_cores_each_cpu_is_one, test_what_somebody_has_chosen_is_left, test_what_is_not_known_or_all_as_near_is_left,
      test_threads_stay_where_their_rank_is, test_ranks_that_share_too_few_cores_have_a_thread_each, test_variables_that_place_threads_are_left_to,
      test_ranks_on_the_cpu_or_on_one_gpu_by_name_are_left)
