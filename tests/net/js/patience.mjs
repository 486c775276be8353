// How long js-libp2p waits in these tests: its own deadlines are seconds.
export const WAIT = 60_000 // milliseconds for whatever a busy machine delays
export const connectionManager = {
  dialTimeout: WAIT,
  inboundUpgradeTimeout: WAIT,
  inboundStreamProtocolNegotiationTimeout: WAIT,
  outboundStreamProtocolNegotiationTimeout: WAIT
}
