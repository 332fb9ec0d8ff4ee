/* Ranks of one machine that find each other by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun and its like start them: they
 * train as one, and whatever is wrong with how they were started ends all of them with one message.
 * Timeout: 240 s
 */
#define SHELL_FOLDER "meet"
#include <stddef.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "parallel/world.h"
#include "tests/shell.h"

/* Until the ranks train. */
#define TRAINING "until grep -q 'step 1/' out; do sleep 0.05; done; "
#define SMALL "$MLP train --task regress --hidden 16 --batch 24 --threads 2 --steps 12 --dtype f64 --log-every 1 "
#define ENDLESS "$MLP train --task regress --hidden 16 --batch 24 --threads 2 --steps 100000000 --log-every 100000000 "

/* A shell's words that start a rank, without waiting. */
#define RANK(rank, size, command) "RANK=" rank " WORLD_SIZE=" size " " command ">>out 2>>err & p=\"$p $!\"; "
#define TWO(command) RANK("0", "2", command) RANK("1", "2", command)
#define FOUR(command) RANK("2", "4", command) RANK("0", "4", command) RANK("3", "4", command) RANK("1", "4", command)
/* Waits for all; stdout ends with their statuses, as "[ 0 0 ]". */
#define ALL_ENDED "for q in $p; do wait $q; s=\"$s $?\"; done; cat out; cat err >&2; echo \"[$s ]\""

/* A port that no other test takes. */
static int port(void) { return 20000 + (int)getpid() % 40000; }

static int start(const char *commands)
{
    char text[16];
    snprintf(text, sizeof text, "%d", port());
    setenv("MASTER_PORT", text, 1);
    setenv("MASTER_ADDR", "localhost", 1);
    return sh("rm -f out err; p=; s=; %s " ALL_ENDED, commands);
}

static const char *statuses(void)
{
    const char *at = strrchr(out_text, '[');
    return at ? at : "";
}

/* ---- Worlds ---------------------------------------------------------------------------------------------- */

START_TEST(test_ranks_train_as_those_that_the_launcher_starts)
{
    double met[12], launched[12];
    ck_assert_sh(0, "rm -rf met launched; " SMALL "--ranks 4 --strategy fsdp --out launched");
    start(FOUR(SMALL "--strategy fsdp --out met "));
    ck_assert_msg(!strcmp(statuses(), "[ 0 0 0 0 ]\n"), "%.900s%.900s", out_text, err_text);
    ck_assert_int_eq(count_of(out_text, "world: 4 ranks on 1 host, transport local, device cpu, strategy fsdp\n"), 1);
    ck_assert_int_eq(count_of(out_text, "step 12/12"), 1);
    ck_assert_int_eq(read_losses("launched", launched, 12), 12);
    ck_assert_int_eq(read_losses("met", met, 12), 12);
    for (int i = 0; i < 12; i++) ck_assert_double_eq(met[i], launched[i]);
}
END_TEST

START_TEST(test_a_signal_to_one_rank_saves_and_ends_all)
{
    start("rm -rf saved; " TWO(ENDLESS "--out saved ")
          TRAINING "kill -TERM $!;");
    ck_assert_msg(!strcmp(statuses(), "[ 0 0 ]\n"), "%.900s%.900s", out_text, err_text);
    ck_assert_int_eq(count_of(out_text, "stopped by a signal after step "), 1);
    ck_assert_sh(0, "ls saved/checkpoints/step-*/manifest.json");
}
END_TEST

/* ---- What goes wrong ------------------------------------------------------------------------------------- */

/* These are the statuses, and one process says why. */
static void expect_statuses(const char *commands, const char *status, const char *message)
{
    start(commands);
    ck_assert_msg(!strncmp(statuses(), status, strlen(status)), "%.300s: %.900s%.900s", message, out_text, err_text);
    ck_assert_msg(strstr(err_text, message) && count_of(err_text, "mlp: ") == 1, "%s: %.900s", message, err_text);
}

/* Every process fails, one of them says why, in time. */
static void expect_end(const char *commands, const char *status, const char *message)
{
    double begin = par_seconds();
    expect_statuses(commands, status, message);
    double seconds = par_seconds() - begin;
    ck_assert_msg(seconds < 1 + 5, "%s: %g s", message, seconds);
}

#define WAITS SMALL "--timeout 1 "

START_TEST(test_ranks_that_do_not_come_are_named)
{
    expect_end(RANK("0", "4", WAITS) RANK("2", "4", WAITS), "[ 2 2 ]", "mlp: ranks 1, 3 of 4 did not come to localhost:");
    ck_assert_str_has(err_text, " within 1 s: start as many processes as WORLD_SIZE says, each with its RANK\n");
    expect_end(RANK("1", "3", WAITS) RANK("2", "3", WAITS), "[ 2 2 ]", "mlp: rank 0 of 3 did not come to localhost:");
}
END_TEST

START_TEST(test_ranks_that_cannot_be_are_named)
{
    expect_end(RANK("0", "3", WAITS) RANK("1", "3", WAITS) RANK("1", "3", WAITS), "[ 2 2 2 ]",
               "mlp: two processes with RANK=1 came to localhost:");
    expect_end(RANK("0", "2", WAITS) RANK("0", "2", WAITS), "[ 2 2 ]", "mlp: two processes with RANK=0 came to localhost:");
    expect_end(RANK("0", "2", WAITS) RANK("2", "2", WAITS), "[ 2 2 ]", "mlp: RANK=2 is none of 0 to 1, which WORLD_SIZE=2 asks for\n");
    expect_end(RANK("0", "2", WAITS) RANK("1", "3", WAITS), "[ 2 2 ]",
               "mlp: rank 1 was started with WORLD_SIZE=3 but rank 0 with WORLD_SIZE=2: start all with the same, ");
    expect_end(RANK("0", "999", WAITS "--batch 999 ") RANK("1", "999", WAITS "--batch 999 "), "[ 2 2 ]",
               "mlp: WORLD_SIZE=999: a machine has at most 256 ranks\n");
}
END_TEST

START_TEST(test_variables_that_say_nothing_are_named)
{
    expect_end("WORLD_SIZE=2 " SMALL ">>out 2>>err & p=\"$p $!\"; ", "[ 2 ]", "mlp: WORLD_SIZE=2 is set, but RANK is no number: ");
    expect_end("export WORLD_SIZE=two RANK=0; " SMALL ">>out 2>>err & p=\"$p $!\"; ", "[ 2 ]",
               "mlp: WORLD_SIZE=two is no number of processes; ");
    expect_end("export MASTER_PORT=99999; " TWO(WAITS), "[ 2 2 ]",
               " are set, but MASTER_ADDR and MASTER_PORT, by which processes find each other, are not: set them to localhost and ");
    expect_end("export MASTER_ADDR=nowhere.invalid; " TWO(WAITS), "[ 2 2 ]",
               "mlp: MASTER_ADDR=nowhere.invalid cannot be resolved (");
    ck_assert_sh(0, "RANK=0 WORLD_SIZE=1 " SMALL);
}
END_TEST

START_TEST(test_ranks_of_several_hosts_are_sent_to_their_launchers)
{
    expect_end("export MASTER_ADDR=192.0.2.7; " TWO(WAITS), "[ 2 2 ]",
               "mlp: MASTER_ADDR=192.0.2.7 is no address of this machine, and ranks on several hosts are started by mpirun or srun: ");
    expect_end("export LOCAL_WORLD_SIZE=1; " TWO(WAITS), "[ 2 2 ]",
               "mlp: LOCAL_WORLD_SIZE=1 of WORLD_SIZE=2 ranks are on this host, and ranks on several hosts are started by ");
}
END_TEST

START_TEST(test_settings_that_cannot_be_are_told_by_one_rank)
{
    expect_end(FOUR(WAITS "--strategy hsdp:2x3 "), "[ 2 2 2 2 ]", ": strategy 'hsdp:2x3' is for 6 ranks (");
    expect_end(TWO(WAITS "--strategy ddp+ep:2 "), "[ 2 2 ]", ": strategy 'ddp+ep:2': ");
    expect_end(TWO(WAITS "--strategy fsdp --units none.* "), "[ 2 2 ]",
               ": fsdp: the unit pattern 'none.*' matches no parameter; ");
    expect_end(TWO(WAITS "--ranks 3 "), "[ 2 2 ]",
               ": --ranks 3, but the launcher started 2 processes: leave --ranks out, or start as many\n");
    expect_end(RANK("0", "2", WAITS) RANK("1", "2", WAITS "--stepz 3 "), "[ 1 2 ]",
               "mlp: rank 1: unknown flag --stepz: did you mean --steps?\n");
}
END_TEST

START_TEST(test_settings_that_differ_are_named)
{
    expect_end(RANK("0", "2", WAITS) RANK("1", "2", WAITS "--steps 6 "), "[ 1 1 ]",
               "mlp: ranks disagree at step 1: option steps is 12 on rank 0 but 6 on rank 1\n");
    expect_end(RANK("0", "2", WAITS) RANK("1", "2", WAITS "--clip 1 "), "[ 1 1 ]",
               "mlp: ranks disagree at step 1: option clip is absent on rank 0 but 1 on rank 1\n");
}
END_TEST

START_TEST(test_a_rank_that_is_killed_ends_all)
{
    expect_end(RANK("0", "3", ENDLESS) RANK("1", "3", ENDLESS) RANK("2", "3", ENDLESS) TRAINING "kill -9 $!;",
               "[ 1 1 137 ]", "mlp: rank 2 ended before ");
    expect_end(RANK("0", "2", ENDLESS) "z=$!; " RANK("1", "2", ENDLESS) TRAINING "kill -9 $z;",
               "[ 137 1 ]", "mlp: rank 0 ended before ");
}
END_TEST

/* The second one is told; the first one goes on. */
START_TEST(test_two_worlds_on_one_port)
{
    expect_statuses(TWO(ENDLESS) TRAINING "first=$!; "
                    TWO(WAITS) "wait $!; kill -TERM $first;",
                    "[ 0 0 2 2 ]", " is complete and runs: give each process a RANK of its own, and each world a MASTER_PORT of its own\n");
}
END_TEST

/* Comes to rank 0 as a process of another version would. */
static void come_with_another_layout(void)
{
    struct { uint64_t layout; int32_t rank, ranks; } hello = { par_layout() + 1, 1, 2 };
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    int length = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "tandem.world.%d", port());
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
    for (int i = 0; connect(fd, (struct sockaddr *)&name, size) != 0; i++, usleep(20000)) ck_assert_int_lt(i, 200);
    ck_assert_int_eq(send(fd, &hello, sizeof hello, 0), sizeof hello);
    char answer[1024];
    ck_assert_int_gt(recv(fd, answer, sizeof answer, 0), 0);
    close(fd);
}

START_TEST(test_another_version_is_told)
{
    start("RANK=0 WORLD_SIZE=2 " SMALL ">version 2>&1 & ");
    come_with_another_layout();
    ck_assert_sh(0, "until grep -q mlp: version; do sleep 0.05; done; cat version");
    ck_assert_str_has(out_text, " runs another version of Tandem than rank 0: start the same program for all ranks\n");
}
END_TEST

TESTS("meet", test_ranks_train_as_those_that_the_launcher_starts, test_a_signal_to_one_rank_saves_and_ends_all,
      test_ranks_that_do_not_come_are_named, test_ranks_that_cannot_be_are_named, test_variables_that_say_nothing_are_named,
      test_ranks_of_several_hosts_are_sent_to_their_launchers, test_settings_that_cannot_be_are_told_by_one_rank,
      test_settings_that_differ_are_named, test_a_rank_that_is_killed_ends_all, test_two_worlds_on_one_port, test_another_version_is_told)
