# What `nolocod fleet` does on one host. POSIX sh reads it from standard input, below these values (remote.py):
#   action: up, status, update or down         program: nolocod as this host knows it    dir: the data directory
#   launch: the text of fleet.sh, which becomes the daemon                               unit: systemd's name for it
#   install: a command that the user gave, or nothing    seconds: for all of it          "$@": limits, KEY=VALUE each
# shellcheck shell=sh disable=SC2154
PATH="$HOME/.local/bin:$PATH"
export PATH
log=$dir/node.log
end=$(($(date +%s) + seconds))

fail() {
    printf '%s\n' "$1" >&2
    exit 1
}

runs() { "$program" status --data-dir "$dir" >/dev/null 2>&1; }

trains() { "$program" status --json --data-dir "$dir" 2>/dev/null | grep -Eq '^  "state": "(training|paused|finished)"'; }

late() { [ "$(date +%s)" -ge "$end" ]; }

# A user's services end with his last session, unless he lingers.
has_systemd() {
    { command -v systemd-run && systemctl --user show-environment; } >/dev/null 2>&1 || return 1
    loginctl enable-linger >/dev/null 2>&1
    [ "$(loginctl show-user "$(id -un)" -p Linger --value 2>/dev/null)" = yes ]
}

start() {
    umask 077
    { mkdir -p "$dir" && printf '%s\n' "$launch" >"$dir/fleet.sh" && touch "$log"; } || fail "$dir cannot be written."
    [ "$(wc -c <"$log")" -lt 16777216 ] || : >"$log"
    from=$(($(wc -c <"$log") + 1))
    if has_systemd; then
        systemctl --user is-active --quiet "$unit" || {
            systemctl --user stop "$unit" 2>/dev/null # one that waits to be restarted
            systemd-run --user --quiet --collect --no-block --unit="$unit" --working-directory="$dir" \
                -p Type=notify -p Restart=on-failure -p RestartSec=30 -p KillMode=mixed -p TimeoutStopSec=120 \
                /bin/sh fleet.sh >&2 || exit
        }
    else
        # shellcheck disable=SC2046 # nothing, where there is no setsid
        nohup $(command -v setsid) sh "$dir/fleet.sh" >/dev/null 2>&1 &
    fi
    until runs; do
        said=$(tail -c "+$from" "$log" | grep -A 2 '^error NLC-')
        case $said in
            "" | *NLC-107*) ;; # a daemon that is just coming up holds the directory
            *) fail "$said" ;;
        esac
        ! late || fail "the daemon does not answer yet: $(tail -n 1 "$log")"
        sleep 1
    done
}

install_it() { sh -c "$install" >&2 || fail "the command of --install failed."; }

main() {
    if [ "$action" = update ] && [ -n "$install" ]; then install_it; fi
    if ! command -v "$program" >/dev/null; then
        { [ "$action" = up ] && [ -n "$install" ]; } ||
            fail "$program is not there. Install it, for example with: uv tool install nolocod; or give up --install COMMAND."
        install_it
        command -v "$program" >/dev/null || fail "$program is not there after the command of --install."
    fi
    case $action in
        down | update)
            "$program" stop --within "$seconds" --data-dir "$dir" >&2 || exit
            systemctl --user stop "$unit" >/dev/null 2>&1 # one that waits to be restarted
            ;;
    esac
    case $action in
        down) return 0 ;;
        up | update)
            runs || start
            [ $# -eq 0 ] || "$program" set --data-dir "$dir" "$@" >/dev/null || exit
            ;;
    esac
    while [ "$action" = update ] && ! trains; do
        ! late || fail "it does not train again yet: $(tail -n 1 "$log")"
        sleep 1
    done
    echo "--- nolocod fleet"
    "$program" status --json --data-dir "$dir"
}

main "$@" </dev/null
