#!/bin/busybox sh
# The first program of the guest. The root file system is the host's, read-only; the guest's changes stay in memory.
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for module in $($b cat /modules/order); do $b insmod "/modules/$module"; done
$b mkdir -p /low /up /new
$b mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose root /low
$b mount -t tmpfs -o size=1500m tmpfs /up
$b mkdir /up/upper /up/work
$b mount -t overlay -o lowerdir=/low,upperdir=/up/upper,workdir=/up/work,xino=off overlay /new
$b cp /guest.sh /vmfake.ko /nvidia.ko /new/
$b mount --move /dev /new/dev; $b umount /sys /proc
exec $b switch_root /new /bin/sh /guest.sh
