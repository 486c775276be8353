// How long js-libp2p waits in these tests: its own deadlines are seconds.
export const WAIT = 60_000 // milliseconds for whatever a busy machine delays
export const connectionManager = {
  dialTimeout: WAIT,
  inboundUpgradeTimeout: WAIT,
  inboundStreamProtocolNegotiationTimeout: WAIT,
  outboundStreamProtocolNegotiationTimeout: WAIT
}

// Its monitor pings every connection each 10 s, on the one stream that may be open for that: whoever asks for a ping
// just then is refused, and the connection is dropped where the monitor itself comes second.
export const connectionMonitor = { enabled: false }
