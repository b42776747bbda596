// Messages between two ranks: packets through the channel in the sender's segment.
//
//     packet    packet_header_bytes     PacketHeader, in the first packet of a message
//               the rest                data
#include <algorithm>
#include <cstring>

#include "host_call.hpp"

namespace paceline {

void HostGroup::send(const std::byte* data, std::size_t bytes, int peer, std::int64_t tag,
                     double timeout_s) {
  need_peer(peer);
  const auto to = static_cast<std::size_t>(peer);
  const std::lock_guard lock(channels_[to]->sending);
  check_usable();
  write_call(own().send_call, {Operation::send, bytes, peer}, ++channels_[to]->sent);
  Wait wait{timeout_s, 0, &own().send_call};
  const HostSegment& segment = *peers_[index_].segment;
  ChannelHeader& channel = segment.channel(static_cast<std::uint32_t>(peer));
  const std::size_t room = segment.packet_bytes() - packet_header_bytes;
  std::uint32_t number = channel.written.load(std::memory_order_relaxed);
  for (std::size_t at = 0; at == 0 || at < bytes; at += room) {
    await(channel.read, number + 1 - static_cast<std::uint32_t>(packet_count), to,
          channel.read_waiters, wait);
    std::byte* packet = segment.packet(static_cast<std::uint32_t>(peer), number);
    const PacketHeader header{bytes, tag};
    std::memcpy(packet, &header, sizeof header);
    if (bytes != 0)
      std::memcpy(packet + packet_header_bytes, data + at, std::min(room, bytes - at));
    advance(channel.written, ++number, channel.written_waiters);
  }
  own().send_call.running.store(0, std::memory_order_relaxed);
}

void HostGroup::receive(std::byte* data, std::size_t bytes, int peer, std::int64_t tag,
                        double timeout_s) {
  need_peer(peer);
  const auto from = static_cast<std::size_t>(peer);
  Channel& state = *channels_[from];
  const std::lock_guard lock(state.receiving);
  check_usable();
  if (take_kept(state.kept, data, bytes, tag, peer)) return;
  write_call(own().receive_call, {Operation::receive, bytes, peer}, ++state.received);
  Wait wait{timeout_s, 0, &own().receive_call};
  while (true) {
    const PacketHeader header = next_message(from, wait);
    if (header.tag == tag) {
      check_length(header.message_bytes, bytes, peer, tag);
      read_message(from, data, bytes, wait);
      break;
    }
    Message message{header.tag, std::vector<std::byte>(header.message_bytes)};
    read_message(from, message.data.data(), message.data.size(), wait);
    state.kept.push_back(std::move(message));
  }
  own().receive_call.running.store(0, std::memory_order_relaxed);
}

// Waits for the first packet of the next message; it stays in the channel.
PacketHeader HostGroup::next_message(std::size_t peer, Wait& wait) {
  const HostSegment& segment = *peers_[peer].segment;
  const auto self = static_cast<std::uint32_t>(index_);
  ChannelHeader& channel = segment.channel(self);
  const std::uint32_t number = channel.read.load(std::memory_order_relaxed);
  await(channel.written, number + 1, peer, channel.written_waiters, wait);
  PacketHeader header{};
  std::memcpy(&header, segment.packet(self, number), sizeof header);
  return header;
}

void HostGroup::read_message(std::size_t peer, std::byte* data, std::size_t bytes, Wait& wait) {
  const HostSegment& segment = *peers_[peer].segment;
  const auto self = static_cast<std::uint32_t>(index_);
  ChannelHeader& channel = segment.channel(self);
  const std::size_t room = segment.packet_bytes() - packet_header_bytes;
  std::uint32_t number = channel.read.load(std::memory_order_relaxed);
  for (std::size_t at = 0; at == 0 || at < bytes; at += room) {
    await(channel.written, number + 1, peer, channel.written_waiters, wait);
    if (bytes != 0)
      std::memcpy(data + at, segment.packet(self, number) + packet_header_bytes,
                  std::min(room, bytes - at));
    advance(channel.read, ++number, channel.read_waiters);
  }
}

bool HostGroup::take_kept(std::deque<Message>& kept, std::byte* data, std::size_t bytes,
                          std::int64_t tag, int peer) {
  const auto found = std::find_if(kept.begin(), kept.end(),
                                  [&](const Message& message) { return message.tag == tag; });
  if (found == kept.end()) return false;
  check_length(found->data.size(), bytes, peer, tag);
  if (bytes != 0) std::memcpy(data, found->data.data(), bytes);
  kept.erase(found);
  return true;
}

void HostGroup::check_length(std::size_t sent, std::size_t expected, int peer, std::int64_t tag) {
  if (sent == expected) return;
  fail(GroupFailure::mismatch, peer,
       "rank " + std::to_string(peer) + " sent " + std::to_string(sent) + " bytes with tag " +
           std::to_string(tag) + ", rank " + std::to_string(rank_) + " receives " +
           std::to_string(expected));
}

void HostGroup::need_peer(int peer) const {
  need_root(peer);
  if (peer == rank_)
    throw GroupError(GroupFailure::usage, peer,
                     "rank " + std::to_string(peer) + " cannot exchange messages with itself");
}

}  // namespace paceline
