#!/bin/sh
# two_hosts.sh COMMAND...: runs a command once on each of two "hosts", network namespaces of this machine with a wire between
# them and names of their own, under mpirun. CUT=FILE: the wire is cut once the file has something in it; status 99 if the
# command runs WITHIN=SECONDS after that still, else 1 (mpirun itself waits for the lost host). ASTRAY=1: ranks are told to use
# another network, which each host has and no wire joins. Status 77: namespaces cannot be had.
set -u
a=td$$a b=td$$b
folder=$(mktemp -d) || exit 77
clean() {
    ip netns pids $a 2>/dev/null | xargs -r kill -9
    ip netns pids $b 2>/dev/null | xargs -r kill -9
    ip netns del $a 2>/dev/null
    ip netns del $b 2>/dev/null
    rm -rf "$folder"
}
trap clean EXIT
trap 'exit 1' INT TERM
wire() {
    ip netns add $a && ip netns add $b && ip link add $a type veth peer name $b &&
        ip link set $a netns $a && ip link set $b netns $b &&
        ip -n $a addr add 10.97.0.1/24 dev $a && ip -n $b addr add 10.97.0.2/24 dev $b &&
        ip -n $a link set $a up && ip -n $b link set $b up && ip -n $a link set lo up && ip -n $b link set lo up &&
        ip netns exec $a unshare -u true || return
    network=10.97.0.0/24
    [ -n "${ASTRAY:-}" ] || return 0
    network=10.98.0.0/24
    for n in $a $b; do
        ip -n $n link add stray type veth peer name end && ip -n $n link set stray up && ip -n $n link set end up || return
    done
    ip -n $a addr add 10.98.0.1/24 dev stray && ip -n $b addr add 10.98.0.2/24 dev stray
}
wire >/dev/null 2>&1 || exit 77

# What mpirun calls in place of ssh: HOST COMMAND...
cat >"$folder/agent" <<END
#!/bin/sh
case \$1 in 10.97.0.1) n=$a ;; *) n=$b ;; esac
shift
exec ip netns exec \$n unshare -u sh -c "hostname host-\$n; \$*"
END
chmod +x "$folder/agent"
cat >"$folder/start" <<END
hostname host-$a
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec mpirun --host 10.97.0.1,10.97.0.2 -n 2 --mca plm_rsh_agent $folder/agent --mca btl self,tcp \
    --mca btl_tcp_if_include $network --mca oob_tcp_if_include 10.97.0.0/24 "\$@"
END
start() { timeout 60 ip netns exec $a unshare -u sh "$folder/start" "$@"; }
if [ -z "${CUT:-}" ]; then
    start "$@"
    exit
fi
start "$@" &
until [ -s "$CUT" ] || ! kill -0 $!; do sleep 0.1; done
ip -n $a link set $a down
end=$(($(date +%s) + WITHIN))
runs() {
    for process in $(ip netns pids $a) $(ip netns pids $b); do
        [ "$(readlink /proc/$process/exe)" = "$(readlink -f "$1")" ] && return
    done
    return 1
}
while runs "$1"; do
    [ "$(date +%s)" -lt $end ] || exit 99
    sleep 0.1
done
exit 1
