# One machine of the cluster, in namespaces of its own: machine.sh FOLDER NAME COMMAND
# A line on its input says that its network is there. It ends at the end of the input, with all that runs in it.
set -eu
folder=$1 name=$2 command=$3
hostname "$name"
read -r _
mount -t tmpfs -o mode=1777 shm /dev/shm
for file in group hosts passwd resolv.conf; do
  mount --bind "$folder/$name/$file" "/etc/$file"
done
while read -r closed parts; do # folders on the way to this checkout and its Python that only root may enter
  mount --bind "$closed" "$folder/aside"
  mount -t tmpfs -o mode=755 open "$closed"
  for part in $parts; do
    mkdir "$closed/$part"
    mount --bind "$folder/aside/$part" "$closed/$part"
  done
  umount "$folder/aside"
done <"$folder/closed"
bash -euc "$command" </dev/null
cat
