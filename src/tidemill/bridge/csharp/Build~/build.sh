#!/bin/sh
# Compiles the library and the sample worlds with Mono into a folder: build.sh FOLDER. Each world is a program there: FOLDER/reach, FOLDER/corridor, FOLDER/drift, FOLDER/trivial.
set -eu
package=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
mcs -langversion:7.2 -unsafe -warnaserror -optimize -target:library -out:"$out/Tidemill.dll" "$package"/Runtime/*.cs
for world in Reach Corridor Drift Trivial; do
    name=$(printf '%s' "$world" | tr '[:upper:]' '[:lower:]')
    mcs -langversion:7.2 -unsafe -warnaserror -optimize -target:exe -main:"Tidemill.Samples.$world" -r:"$out/Tidemill.dll" -out:"$out/$world.exe" \
        "$package/Samples~/Worlds/Program.cs" "$package/Samples~/Worlds/$world.cs"
    printf '#!/bin/sh\nMONO_DISABLE_SHARED_AREA=1 exec mono "%s/%s.exe" "$@"\n' "$out" "$world" >"$out/$name"
    chmod 755 "$out/$name"
done
