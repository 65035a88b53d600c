hook=$HOOK_DIRECTORY/nvidia-cdi-hook
for source in $HOOK_SOURCES; do
  if [ -x "$source" ]; then break; fi
done
if [ ! -x "$source" ]; then
  echo "the image has none of these programs: $HOOK_SOURCES; set another image (cdiHook.image)"
  exit 1
fi
# Files that a killed earlier run left.
rm -f "$HOOK_DIRECTORY"/.nvidia-cdi-hook.*
if [ -x "$hook" ] && cmp -s "$source" "$hook"; then
  echo "$hook is up to date"
  exit 0
fi
# Containers that start now still run the old program. Replace it only when the new program is complete and on
# the disk.
new=$HOOK_DIRECTORY/.nvidia-cdi-hook.$POD_UID
if cp "$source" "$new" && chmod 0755 "$new" && { sync "$new" || sync; } && mv -f "$new" "$hook"; then
  echo "installed $source as $hook"
  exit 0
fi
rm -f "$new"
if [ -x "$hook" ]; then
  echo "could not copy $source to the host; $hook stays in use"
  exit 0
fi
echo "could not copy $source to $hook: see the error above"
exit 1
