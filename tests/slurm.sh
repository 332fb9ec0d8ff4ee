#!/usr/bin/env bash
# Proves that ranks meet under Slurm: brings up a cluster of two nodes on this machine, of daemons and files of its own, runs
# what users run on it, srun, sbatch and scancel, and takes it down.
#
#     tests/slurm.sh [BUILD]             as root, with Debian's packages slurm-wlm, munge and libpmix-dev; BUILD (build) has
#                                    bin/mlp
#
# The nodes are two slurmd with one name and one /dev/shm, which Open MPI's shared memory takes for one host's under srun, but not
# under mpirun: mpirun stays on one of them here.
set -euo pipefail
cd "$(dirname "$0")/.."

die()
{
    echo "slurm.sh: $*" >&2
    exit 1
}
[ "$(id -u)" -eq 0 ] || die "starting tasks as slurmd does needs root: run it with sudo."
for program in munged slurmctld slurmd srun; do
    command -v $program >/dev/null || die "$program is missing: apt-get install slurm-wlm munge libpmix-dev"
done
compgen -G "/usr/lib/*/pmix2/lib/libpmix.so" >/dev/null || die "srun --mpi=pmix lacks libpmix.so: apt-get install libpmix-dev"
mlp=$(realpath "${1:-build}/bin/mlp")
[ -x "$mlp" ] || die "there is no $mlp: build it first, or name a build folder."

# ---- The cluster -------------------------------------------------------------------------------------------

unset "${!SLURM_@}" "${!PMIX_@}" "${!OMPI_@}"
folder=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
port=$((20000 + $$ % 3000 * 4))
daemons=()
export SLURM_CONF=$folder/slurm.conf OMP_WAIT_POLICY=passive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

take_down()
{
    local at
    timeout 10 scancel --quiet --user=root 2>/dev/null || true
    for ((at = 0; at < 20; at++)); do
        [ -n "$(timeout 10 squeue --noheader 2>/dev/null)" ] || break
        sleep 0.5
    done
    for ((at = ${#daemons[@]} - 1; at >= 0; at--)); do
        kill "${daemons[at]}" 2>/dev/null || true
        wait "${daemons[at]}" 2>/dev/null || true
    done
    rm -rf --one-file-system "$folder"
}
trap take_down EXIT
trap 'exit 1' INT TERM

# daemon NAME COMMAND...: in the background; what it writes is kept.
daemon()
{
    local name=$1
    shift
    "$@" >"$folder/$name.log" 2>&1 &
    daemons+=($!)
}

chmod 755 "$folder"
mkdir "$folder"/{state,spool-a,spool-b,tmp-a,tmp-b,runs}
(umask 077 && head -c 1024 /dev/urandom >"$folder/key")
cat >"$SLURM_CONF" <<END_OF_CONF
ClusterName=tandem
SlurmctldHost=$(hostname)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$port
AuthType=auth/munge
AuthInfo=socket=$folder/munge
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
TmpFS=$folder/tmp-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
MpiDefault=none
KillWait=20
NodeName=a NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4
NodeName=b NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=4
PartitionName=all Nodes=a,b Default=YES State=UP
END_OF_CONF
daemon munged munged --foreground --force --socket="$folder/munge" --key-file="$folder/key" --log-file="$folder/munged.own" \
    --pid-file="$folder/munged.pid" --seed-file="$folder/munged.seed"
daemon slurmctld slurmctld -D
daemon slurmd-a slurmd -D -N a
daemon slurmd-b slurmd -D -N b
for ((at = 0; at < 60; at++)); do
    [ "$(timeout 10 sinfo --noheader --states=idle --format=%D 2>/dev/null)" != 2 ] || break
    sleep 0.5
done
if [ $at = 60 ]; then
    tail -n 20 "$folder"/*.log >&2
    die "the nodes did not come up, as their logs above may say."
fi
cd "$folder/runs"

# ---- What is run on it -------------------------------------------------------------------------------------

failed=0
train=("$mlp" train --task regress --threads 1 --timeout 20)
short=("${train[@]}" --steps 5)
long=("${train[@]}" --steps 1000000 --log-every 1000)

# came CASE STATUS OUTPUT WANTED_STATUS TEXT...: the status (any: all but 0) and each text once.
came()
{
    local name=$1 status=$2 output=$3 wanted=$4 text good=1
    shift 4
    case $wanted in
    any) [ "$status" -ne 0 ] || good=0 ;;
    *) [ "$status" -eq "$wanted" ] || good=0 ;;
    esac
    for text in "$@"; do
        [ "$(grep -c -F -e "$text" "$output")" -eq 1 ] || good=0
    done
    if [ $good = 1 ]; then
        echo "good: $name"
        return
    fi
    failed=1
    printf 'FAILED: %s: status %s, not %s, or not once each of:\n' "$name" "$status" "$wanted"
    printf '    %s\n' "$@"
    tail -n 30 "$output"
}

# run NAME COMMAND...: into file NAME; sets status.
run()
{
    local name=$1
    shift
    status=0
    timeout --signal=KILL 100 "$@" >"$name" 2>&1 || status=$?
}

# await TEXT FILE: until it is there.
await()
{
    local at
    for ((at = 0; at < 300; at++)); do
        ! grep -q -F -e "$1" "$2" 2>/dev/null || return 0
        sleep 0.2
    done
    echo "'$1' was not said in $2"
    return 1
}

# programs NAME COMMAND...: a file for --multi-prog, a rank each.
programs()
{
    local name=$1 rank=0
    shift
    for command in "$@"; do
        echo "$((rank++)) $command"
    done >"$name"
}

# one_job: the number of the only job.
one_job() { squeue --noheader --format=%i; }

# process RANK: its process on node a, of the only job.
process() { scontrol listpids "$(one_job).0" a | awk -v rank="$1" '$5 == rank { print $1 }'; }

run alone "${short[@]}" --out alone.run
curve=$(grep '^eval at step 5 ' alone) || die "mlp itself does not train: $(tail -n 5 alone)"

run one_node srun --mpi=pmix -n 2 "${short[@]}" --out one_node.run
came "two ranks of one node" $status one_node 0 "world: 2 ranks on 1 host" "$curve"
run two_nodes srun --mpi=pmix -N 2 -n 4 "${short[@]}" --out two_nodes.run
came "four ranks of two nodes" $status two_nodes 0 "world: 4 ranks on 1 host" "$curve"
SLURM_MPI_TYPE=pmix run variable srun -n 2 "${short[@]}" --out variable.run
came "pmix by a variable" $status variable 0 "world: 2 ranks on 1 host" "$curve"

srun --mpi=pmix -n 2 "${short[@]}" --out beside.run >beside 2>&1 &
run at_once srun --mpi=pmix -n 2 "${short[@]}" --out at_once.run
came "one of two worlds at once" $status at_once 0 "world: 2 ranks on 1 host" "$curve"
status=0
wait $! || status=$?
came "and the other" $status beside 0 "world: 2 ranks on 1 host" "$curve"

for kind in none pmi2; do
    run $kind srun --mpi=$kind -n 2 "${short[@]}" --out $kind.run
    came "--mpi=$kind says what to add" $status $kind 2 " of 2 by srun without PMIx, through which Open MPI's processes find each other: add --mpi=pmix"
    run alone_$kind srun --mpi=$kind -n 1 "${short[@]}" --out alone_$kind.run
    came "--mpi=$kind does for one process" $status alone_$kind 0 "single on 1 rank" "$curve"
done

programs differ "${short[*]} --out differ.run" "${short[*]} --steps 8 --out differ.run"
run differ.out srun --mpi=pmix -n 2 --multi-prog differ
came "another flag on one rank" $status differ.out 1 "mlp: ranks disagree at step 1: option steps is 5 on rank 0 but 8 on rank 1"
programs wrong "${short[*]} --out wrong.run" "${short[*]} --nonsense 8"
run wrong.out srun --mpi=pmix -n 2 --multi-prog wrong
came "a flag that one rank does not know" $status wrong.out any "mlp: rank 1: unknown flag --nonsense"
programs gone "${short[*]} --timeout 3 --out gone.run" /bin/false
run gone.out srun --mpi=pmix -n 2 --multi-prog gone
came "a rank that never comes" $status gone.out any "mlp: not all processes came to their world within 3 s (rank 1 is gone): "
run gone_at_once srun --mpi=pmix --kill-on-bad-exit=1 -n 2 --multi-prog gone
came "a rank that never comes, at once" $status gone_at_once any "Terminating StepId="
run folder srun --mpi=pmix -n 2 "${short[@]}" --out /proc/none
came "a folder that cannot be" $status folder 1 "mlp: rank 0: cannot make directory /proc/none: "

# begin NAME FLAG...: a long run of two ranks of node a in the background, once it trains.
begin()
{
    local name=$1
    shift
    srun "$@" --mpi=pmix --nodelist=a -n 2 "${long[@]}" --timeout 3 --out "$name.run" >"$name" 2>&1 &
    await "step 1000/" "$name" || failed=1
}
end() { status=0; wait $! || status=$?; }

begin killed
kill -KILL "$(process 1)"
end
came "a rank that is killed" $status killed any "mlp: rank 1 has died; rank 0 waited for others at all_reduce"
begin killed_at_once --kill-on-bad-exit=1
kill -KILL "$(process 1)"
end
came "a rank that is killed, and srun ends the others" $status killed_at_once any "mlp: rank 1 has died; rank 0 waited for others at all_reduce"
begin stopped
kill -STOP "$(process 1)"
end
came "a rank that is stopped" $status stopped any "mlp: rank 1 did not arrive at all_reduce"
begin cancelled
scancel "$(one_job)"
end
came "scancel: saved" $status cancelled 0 "saved: --resume --out cancelled.run goes on" "checkpoint: cancelled.run/checkpoints/step-"
at=$(sed -n 's/^stopped by a signal after step \([0-9]*\),.*/\1/p' cancelled)
run resumed srun --mpi=pmix -n 2 "${train[@]}" --steps $((at + 2)) --resume --out cancelled.run
came "and gone on with" $status resumed 0 "steps $((at + 1)) to $((at + 2))"

# batch NAME COMMAND: by sbatch -n 2; waits until it has ended.
batch()
{
    sbatch --quiet -n 2 --output="$1" --wrap "$2; echo it ended with \$?" >/dev/null
    await "it ended with " "$1" || failed=1
}
batch script "${short[*]} --out script.run"
came "a batch script is alone" 0 script 0 "single on 1 rank" "$curve" "it ended with 0"
batch ranks "${short[*]} --ranks 2 --out ranks.run"
came "a batch script's own ranks" 0 ranks 0 "world: 2 ranks on 1 host, transport local" "$curve" "it ended with 0"
batch step "srun --mpi=pmix ${short[*]} --out step.run"
came "srun in a batch script" 0 step 0 "world: 2 ranks on 1 host" "$curve" "it ended with 0"
batch mpirun "mpirun ${short[*]} --out mpirun.run"
came "mpirun in a batch script" 0 mpirun 0 "world: 2 ranks on 1 host" "$curve" "it ended with 0"
sbatch --quiet -n 2 --output=ended --wrap "srun --mpi=pmix ${long[*]} --out ended.run" >/dev/null
await "step 1000/" ended || failed=1
scancel "$(one_job)"
await "checkpoint: " ended || failed=1
came "scancel of a batch: saved" 0 ended 0 "saved: --resume --out ended.run goes on" "checkpoint: ended.run/checkpoints/step-"

[ $failed = 0 ] || die "what failed is shown above."
