#!/bin/sh
# A home router. The network that GATEWAY lies in is inside, the other one outside.
#
#   GATEWAY   the address that the inside has as its default route, with its prefix: 10.201.0.254/24
#   NAT       cone: the port is kept, so that two such homes can punch through (RFC 4787: filters by address and port);
#             symmetric: another port for every connection, so that only a relay helps
#
# The engine takes .1 of a network for itself and lets no container have the address of a gateway that it was told of.
# So the router takes that one by itself, which needs NET_ADMIN and nothing more.
set -eu
network=$(echo "$GATEWAY" | cut -d. -f1-3)
inside=$(ip -o -4 addr | grep -F " $network." | cut -d' ' -f2 | head -n 1)
outside=$(ip -o -4 addr | grep -v -F -e " $network." -e " lo " | sed 's/^[0-9]*: *//' | cut -d' ' -f1 | head -n 1)
[ -n "$inside" ] && [ -n "$outside" ] || { echo "no network inside or outside"; exit 1; }
ip addr replace "$GATEWAY" dev "$inside"

case ${NAT:-cone} in
    cone) random= ;;
    symmetric) random=--random-fully ;;
    *) echo "NAT=$NAT is neither cone nor symmetric"; exit 1 ;;
esac
iptables -t nat -F POSTROUTING
# shellcheck disable=SC2086 # empty or one word
iptables -t nat -A POSTROUTING -o "$outside" -j MASQUERADE $random
# What nobody inside has asked for is dropped without a word, as routers do.
iptables -P FORWARD DROP
iptables -F FORWARD
iptables -A FORWARD -i "$inside" -o "$outside" -j ACCEPT
iptables -A FORWARD -i "$outside" -o "$inside" -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
iptables -F INPUT
iptables -A INPUT -i "$outside" -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
iptables -A INPUT -i "$outside" -j DROP
touch /run/routing
echo "routing from $inside to $outside, ${NAT:-cone}"
trap 'exit 0' TERM INT
while :; do sleep 3600 & wait $!; done
