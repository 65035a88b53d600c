# Makes the guest a node with GPUs and runs the tests. e2e_vm.py inserts the variables before this script. The output on
# the second serial line is the output of `make e2e-vm`.
exec >/dev/ttyS1 2>&1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
busybox=$KERNEL/bin/busybox version=$(uname -r)
mount -t proc proc /proc; mount -t sysfs sys /sys
mount -t tmpfs tmpfs /run
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /dev/shm
mount -t cgroup2 cgroup2 /sys/fs/cgroup
$busybox stty -F /dev/ttyS1 raw -echo; $busybox stty -F /dev/ttyS2 raw -echo
mkdir -p /lib/modules; mount --bind "$KERNEL/lib/modules" /lib/modules
rm -rf /usr/sbin/modprobe /etc/modprobe.d; mkdir /etc/modprobe.d
printf '#!/bin/sh\nexec %s --argv0 modprobe %s "$@"\n' "$LIBRARIES" "$KERNEL/bin/kmod" >/usr/sbin/modprobe
chmod 755 /usr/sbin/modprobe
$busybox ip link set lo up; hostname vm
mkdir -p /run/node/plugins; mount /dev/vda /run/node/plugins
$busybox insmod /vmfake.ko cards="$CARDS"
$busybox insmod /nvidia.ko order="$ORDER" uuids="$UUIDS"
modprobe snd_hda_intel; modprobe e1000e
for minor in 0 1 2 3; do mknod -m 666 /dev/nvidia$minor c 195 $minor; done
mknod -m 666 /dev/nvidiactl c 195 255; mknod -m 666 /dev/nvidia-modeset c 195 254
mknod -m 666 /dev/nvidia-uvm c 510 0; mknod -m 666 /dev/nvidia-uvm-tools c 510 1
echo "vm: Linux $version is up after $(cut -d' ' -f1 /proc/uptime) s"
cd "$PROJECT" && eval "$PYTHON" -m pytest --confcutdir=tests/vm --timeout=600 --color=no -x -v --durations=0 --durations-min=1 "$TESTS"
echo "vm: exit code $?"
sync; $busybox poweroff -f
