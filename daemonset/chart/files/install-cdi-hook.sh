hook=$HOOK_DIRECTORY/nvidia-cdi-hook
for source in $HOOK_SOURCES; do
  if [ -x "$source" ]; then break; fi
done
if [ ! -x "$source" ]; then
  echo "the image has none of these programs: $HOOK_SOURCES; set another image or HOOK_SOURCES"
  exit 1
fi
# What a killed predecessor left.
rm -f "$HOOK_DIRECTORY"/.nvidia-cdi-hook.*
if [ -x "$hook" ] && cmp -s "$source" "$hook"; then
  echo "$hook is there already"
  exit 0
fi
# Containers start meanwhile and run the old one: the new one takes its place when it is whole and on
# the disk.
new=$HOOK_DIRECTORY/.nvidia-cdi-hook.$POD_UID
if cp "$source" "$new" && chmod 0755 "$new" && { sync "$new" || sync; } && mv -f "$new" "$hook"; then
  echo "$source is installed as $hook"
  exit 0
fi
rm -f "$new"
if [ -x "$hook" ]; then
  echo "$source could not be copied to the host; the older $hook stays in use"
  exit 0
fi
echo "$source could not be copied to $hook: see above"
exit 1
