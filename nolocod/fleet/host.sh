# What `nolocod fleet` does on one host: POSIX sh, from standard input, below its values, which remote.py sets.
# shellcheck shell=sh disable=SC2154
PATH="$HOME/.local/bin:$PATH"
export PATH
log=$dir/node.log
end=$(($(date +%s) + seconds))

fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

await() { # a condition; what it means if it does not come about
    until "$1"; do
        [ "$(date +%s)" -lt "$end" ] || fail "$2: $(tail -n 1 "$log")"
        sleep 1
    done
}

runs() { "$program" status --data-dir "$dir" >/dev/null 2>&1; }

trains() { "$program" status --json --data-dir "$dir" 2>/dev/null | grep -Eq '^  "state": "(training|paused|finished)"'; }

answers() {
    runs && return
    said=$(tail -c "+$from" "$log" | grep -A 2 '^error NLC-')
    case $said in
        "" | *NLC-107*) return 1 ;; # a daemon that is just coming up holds the directory
        *) fail "$said" ;;
    esac
}

has_systemd() { # and a user whose services stay when he logs out
    { command -v systemd-run && systemctl --user show-environment; } >/dev/null 2>&1 || return 1
    loginctl enable-linger >/dev/null 2>&1
    [ "$(loginctl show-user "$(id -un)" -p Linger --value 2>/dev/null)" = yes ]
}

start() {
    umask 077
    { mkdir -p "$dir" && printf '%s\n' "$launch" >"$dir/fleet.sh" && touch "$log"; } || fail "$dir cannot be written."
    [ "$(wc -c <"$log")" -lt 16777216 ] || : >"$log"
    from=$(($(wc -c <"$log") + 1))
    if ! has_systemd; then
        # shellcheck disable=SC2046 # nothing, where there is no setsid
        nohup $(command -v setsid) sh "$dir/fleet.sh" >/dev/null 2>&1 &
    elif ! systemctl --user is-active --quiet "$unit"; then
        systemctl --user stop "$unit" 2>/dev/null # one that waits to be restarted
        systemd-run --user --quiet --collect --no-block --unit="$unit" --working-directory="$dir" -p Type=notify \
            -p Restart=on-failure -p RestartSec=30 -p KillMode=mixed -p TimeoutStopSec=120 /bin/sh fleet.sh >&2 || exit
    fi
    await answers "the daemon does not answer yet"
}

install_it() { [ -z "$install" ] || sh -c "$install" >&2 || fail "the command of --install failed."; }

main() {
    [ "$action" != update ] || install_it
    [ "$action" != up ] || command -v "$program" >/dev/null || install_it
    command -v "$program" >/dev/null ||
        fail "$program is not there. Install it, for example with: uv tool install nolocod; or give up --install COMMAND."
    if [ "$action" = down ] || [ "$action" = update ]; then
        "$program" stop --within "$seconds" --data-dir "$dir" >&2 || exit
        systemctl --user stop "$unit" >/dev/null 2>&1 # one that waits to be restarted
        [ "$action" != down ] || return 0
    fi
    if [ "$action" != status ]; then
        runs || start
        [ $# -eq 0 ] || "$program" set --data-dir "$dir" "$@" >/dev/null || exit
        [ "$action" = up ] || await trains "it does not train again yet"
    fi
    echo "--- nolocod fleet"
    "$program" status --json --data-dir "$dir"
}

main "$@" </dev/null
