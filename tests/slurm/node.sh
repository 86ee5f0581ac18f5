# One machine of the cluster, in namespaces of its own: node.sh FOLDER NAME ADDRESS DAEMON...
# Waits for a line on its input, which comes once its network is there; ends, with all processes, when the input does.
set -eu
folder=$1 name=$2 address=$3
shift 3
hostname "$name"
read -r _
ip link set lo up
if [ -d /sys/class/net/br0 ] || ip link show br0 &>/dev/null; then ip addr add "$address/24" dev br0; ip link set br0 up
else ip addr add "$address/24" dev eth0; ip link set eth0 up; fi
mount -t tmpfs -o mode=1777 shm /dev/shm
for file in hosts passwd resolv.conf; do
  [ -e "$folder/$name.$file" ] || continue
  mount --bind "$folder/$name.$file" "/etc/$file"
done
