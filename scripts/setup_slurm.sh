#!/bin/sh
# A Slurm on this machine, as root: munged, slurmctld and a slurmd for each node, with everything in one folder.
#
#   scripts/setup_slurm.sh start [FOLDER]     prints the SLURM_CONF to export; SLURM_NODES=2 for two nodes
#   scripts/setup_slurm.sh stop  [FOLDER]
#
# For trying the slurm executor and for its tests; not a way to set up a cluster. Daemons listen on loopback.
set -eu
action=${1:-start}
folder=${2:-/var/lib/nemotron-steps-slurm}
port=${SLURM_PORT:-26817}
nodes=${SLURM_NODES:-1}
conf=$folder/slurm.conf

stop() {
    for file in "$folder"/slurmd-*.pid "$folder/slurmctld.pid" "$folder/munged.pid"; do
        [ -f "$file" ] || continue
        pid=$(cat "$file")
        name=$(basename "$file" .pid)
        if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${name%%-*}" ]; then
            kill "$pid"
            for _ in 1 2 3 4 5 6 7 8 9 10; do [ -d "/proc/$pid" ] || break; sleep 0.3; done
            [ ! -d "/proc/$pid" ] || kill -9 "$pid"
        fi
        rm -f "$file"
    done
}

start() {
    stop
    rm -rf "$folder/state" "$folder/spool"
    mkdir -p "$folder/state" "$folder/spool" "$folder/secret" "$folder/munge"
    chmod 755 "$folder" "$folder/munge"
    chmod 700 "$folder/secret"
    # munged checks that nobody else can replace its files.
    [ -f "$folder/secret/munge.key" ] || { umask 077; head -c 1024 /dev/urandom > "$folder/secret/munge.key"; umask 022; }
    munged --key-file="$folder/secret/munge.key" --socket="$folder/munge/socket" --seed-file="$folder/secret/seed" \
        --pid-file="$folder/munged.pid" --log-file="$folder/secret/munged.log"
    host=$(hostname -s)
    cpus=$(nproc)
    memory=$(awk '/MemTotal/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
    cat > "$conf" <<CONF
ClusterName=steps
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket
CredType=cred/munge
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SchedulerParameters=sched_interval=1
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
KillWait=10
MinJobAge=3600
NodeName=node[1-$nodes] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cpus RealMemory=$memory State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
CONF
    export SLURM_CONF="$conf"
    slurmctld -c
    for number in $(seq "$nodes"); do
        mkdir -p "$folder/spool/node$number"
        slurmd -N "node$number"
    done
    for _ in $(seq 60); do
        [ "$(sinfo -h -N -o %t 2>/dev/null | grep -cE 'idle|mix|alloc')" -ge "$nodes" ] && { echo "$conf"; return 0; }
        sleep 0.5
    done
    echo "nodes did not become ready; see $folder/slurmctld.log and $folder/slurmd-node*.log" >&2
    return 1
}

case $action in
    start) start ;;
    stop) stop ;;
    *) echo "usage: $0 start|stop [FOLDER]" >&2; exit 2 ;;
esac
