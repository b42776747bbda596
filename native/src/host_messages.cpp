// Messages between two ranks: packets through the channel in the sender's segment.
//
//     packet    packet_header_bytes     PacketHeader, in the first packet of a message
//               the rest                data
//
// Sends and receives are posted and make progress together, so that any order of messages is right:
// in each call that posts or waits, and, while none waits, in a thread of the group. That thread is
// started with the first message that is not over at once. It looks every `look_again_ns` whether
// somebody waits, since to wake it for each message would cost more than most messages.
#include <algorithm>
#include <cstring>

#include "futex.hpp"
#include "host_call.hpp"

namespace paceline {
namespace {

constexpr std::uint64_t look_again_ns = 1'000'000;
constexpr unsigned looks_until_rest = 50;
constexpr std::uint64_t look_interval_ns = 100'000'000;

std::shared_ptr<Message> make_message(std::size_t bytes, int peer, std::int64_t tag) {
  auto message = std::make_shared<Message>();
  message->bytes = bytes;
  message->peer = peer;
  message->tag = tag;
  return message;
}

}  // namespace

// A thread that waits for a message makes progress itself: the group's thread leaves it to it.
class HostGroup::Attendance {
 public:
  explicit Attendance(HostGroup& group) : group_(group) {
    const std::lock_guard lock(group.messages_mutex_);
    ++group.attending_;
  }
  ~Attendance() {
    const std::lock_guard lock(group_.messages_mutex_);
    --group_.attending_;
  }
  Attendance(const Attendance&) = delete;
  Attendance& operator=(const Attendance&) = delete;

 private:
  HostGroup& group_;
};

std::shared_ptr<Message> HostGroup::post_send(const std::byte* data, std::size_t bytes, int peer,
                                              std::int64_t tag) {
  need_peer(peer);
  auto message = make_message(bytes, peer, tag);
  message->source = data;
  check_usable();  // before the lock, which a forked child may have got locked
  const std::lock_guard lock(messages_mutex_);
  write_call(message->call, {Operation::send, bytes, peer}, ++message_count_);
  channels_[static_cast<std::size_t>(peer)].sends.push_back(message);
  ++under_way_;
  make_progress();
  if (!message->over) watch_in_background();
  return message;
}

std::shared_ptr<Message> HostGroup::post_receive(std::byte* data, std::size_t bytes, int peer,
                                                 std::int64_t tag) {
  if (peer != any_rank) need_peer(peer);
  auto message = make_message(bytes, peer, tag);
  message->target = data;
  check_usable();  // before the lock, which a forked child may have got locked
  const std::lock_guard lock(messages_mutex_);
  write_call(message->call, {Operation::receive, bytes, peer}, ++message_count_);
  ++under_way_;
  bool found = false;
  for (std::size_t from = 0; from < peers_.size() && !found; ++from)
    if (peer == any_rank || static_cast<std::size_t>(peer) == from)
      found = take_arrived(from, message);
  if (!found) receives_.push_back(message);
  make_progress();
  if (!message->over) watch_in_background();
  return message;
}

void HostGroup::wait(const Message& message, double timeout_s) {
  if (message.over.load(std::memory_order_acquire)) return;
  check_usable();
  const Attendance attendance(*this);
  Wait wait{timeout_s, 0, &message.call};
  while (true) {
    const std::uint32_t seen = own().arrivals.load(std::memory_order_seq_cst);
    int peer = any_rank;
    {
      const std::lock_guard lock(messages_mutex_);
      if (message.over) return;
      check_usable();
      make_progress();
      if (message.over) return;
      peer = message.peer;
    }
    await(own().arrivals, seen + 1, peer == any_rank ? any_peer : static_cast<std::size_t>(peer),
          own().arrival_waiters, wait);
  }
}

bool HostGroup::test(const Message& message) {
  if (message.over.load(std::memory_order_acquire)) return true;
  check_usable();
  const std::lock_guard lock(messages_mutex_);
  if (message.over) return true;
  make_progress();
  return message.over;
}

void HostGroup::send(const std::byte* data, std::size_t bytes, int peer, std::int64_t tag,
                     double timeout_s) {
  wait(*post_send(data, bytes, peer, tag), timeout_s);
}

void HostGroup::receive(std::byte* data, std::size_t bytes, int peer, std::int64_t tag,
                        double timeout_s) {
  wait(*post_receive(data, bytes, peer, tag), timeout_s);
}

// Progress

void HostGroup::make_progress() {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peer == index_) continue;
    write_packets(peer);
    read_packets(peer);
  }
}

void HostGroup::write_packets(std::size_t peer) {
  auto& sends = channels_[peer].sends;
  if (sends.empty()) return;
  const HostSegment& segment = *peers_[index_].segment;
  const auto to = static_cast<std::uint32_t>(peer);
  ChannelHeader& channel = segment.channel(to);
  const std::size_t room = segment.packet_bytes() - packet_header_bytes;
  std::uint32_t number = channel.written.load(std::memory_order_relaxed);
  while (!sends.empty() && number - channel.read.load(std::memory_order_acquire) < packet_count) {
    Message& message = *sends.front();
    std::byte* packet = segment.packet(to, number);
    const PacketHeader header{message.bytes, message.tag};
    std::memcpy(packet, &header, sizeof header);
    const std::size_t part = std::min(room, message.bytes - message.moved);
    if (part != 0)
      std::memcpy(packet + packet_header_bytes, message.source + message.moved, part);
    message.moved += part;
    channel.written.store(++number, std::memory_order_release);
    signal(peer);
    if (message.moved == message.bytes) {
      finish(message);
      sends.pop_front();
    }
  }
}

void HostGroup::read_packets(std::size_t peer) {
  const HostSegment& segment = *peers_[peer].segment;
  const auto self = static_cast<std::uint32_t>(index_);
  ChannelHeader& channel = segment.channel(self);
  auto& arrived = channels_[peer].arrived;
  std::uint32_t number = channel.read.load(std::memory_order_relaxed);
  while (channel.written.load(std::memory_order_acquire) != number) {
    std::byte* packet = segment.packet(self, number);
    if (arrived.empty() || arrived.back().complete) {
      PacketHeader header{};
      std::memcpy(&header, packet, sizeof header);
      if (!begin_message(peer, header)) return;  // it stays in the channel, and its sender waits
    }
    Incoming& incoming = arrived.back();
    read_packet(peer, incoming, packet + packet_header_bytes);
    channel.read.store(++number, std::memory_order_release);
    signal(peer);
    if (incoming.complete && incoming.receive != nullptr) {
      finish(*incoming.receive);
      arrived.pop_back();
    }
  }
}

// Finds the receive that a message is for. Without one it is kept, but only to get at what comes
// after it. Returns false if nothing of this peer is wanted.
bool HostGroup::begin_message(std::size_t peer, const PacketHeader& header) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return receive->tag == header.tag &&
           (receive->peer == any_rank || receive->peer == static_cast<int>(peer));
  });
  if (found == receives_.end() && !has_receive_for(peer)) return false;
  Incoming& incoming = channels_[peer].arrived.emplace_back();
  incoming.header = header;
  if (found == receives_.end()) {
    incoming.kept.resize(header.message_bytes);
  } else {
    give(incoming, *found, peer);
    receives_.erase(found);
  }
  return true;
}

void HostGroup::read_packet(std::size_t peer, Incoming& incoming, std::byte* packet) {
  const std::size_t room = peers_[peer].segment->packet_bytes() - packet_header_bytes;
  const std::size_t part = std::min(room, incoming.header.message_bytes - incoming.moved);
  std::byte* target = incoming.receive ? incoming.receive->target : incoming.kept.data();
  take_out(target + incoming.moved, packet, part);
  incoming.moved += part;
  incoming.complete = incoming.moved == incoming.header.message_bytes;
}

// Gives a message that has come, or whose first packets have, to a receive.
void HostGroup::give(Incoming& incoming, std::shared_ptr<Message> receive, std::size_t peer) {
  check_length(incoming.header, *receive, peer);
  if (incoming.moved != 0) std::memcpy(receive->target, incoming.kept.data(), incoming.moved);
  receive->peer = static_cast<int>(peer);
  incoming.receive = std::move(receive);
  incoming.kept = {};
}

bool HostGroup::take_arrived(std::size_t peer, const std::shared_ptr<Message>& receive) {
  auto& arrived = channels_[peer].arrived;
  const auto found = std::find_if(arrived.begin(), arrived.end(), [&](const Incoming& incoming) {
    return incoming.receive == nullptr && incoming.header.tag == receive->tag;
  });
  if (found == arrived.end()) return false;
  give(*found, receive, peer);
  if (found->complete) {
    finish(*receive);
    arrived.erase(found);
  }
  return true;
}

bool HostGroup::has_receive_for(std::size_t peer) const {
  return std::any_of(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return receive->peer == any_rank || receive->peer == static_cast<int>(peer);
  });
}

void HostGroup::finish(Message& message) {
  --under_way_;
  message.over.store(true, std::memory_order_release);
  // Other threads of this rank may sleep for it.
  if (attending_ > 0) signal(index_);
}

void HostGroup::check_length(const PacketHeader& header, const Message& receive,
                             std::size_t peer) {
  if (header.message_bytes == receive.bytes) return;
  fail(GroupFailure::mismatch, static_cast<int>(peer),
       "rank " + std::to_string(peer) + " sent " + std::to_string(header.message_bytes) +
           " bytes with tag " + std::to_string(header.tag) + ", rank " + std::to_string(rank_) +
           " receives " + std::to_string(receive.bytes));
}

// The group's thread

void HostGroup::watch_in_background() {
  if (watching_) return;
  watching_ = true;
  if (!progress_thread_)
    progress_thread_ = std::make_unique<std::thread>([this] { attend_messages(); });
  wake_ups_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(wake_ups_);
}

void HostGroup::attend_messages() noexcept {
  for (unsigned idle_looks = 0;;) {
    const std::uint32_t wake_ups = wake_ups_.load(std::memory_order_seq_cst);
    const std::uint32_t seen = own().arrivals.load(std::memory_order_seq_cst);
    bool alone = false;
    bool resting = false;
    {
      const std::lock_guard lock(messages_mutex_);
      if (stopping_) return;
      alone = attending_ == 0 && under_way_ > 0 && usable_.load();
      if (alone) {
        try {
          make_progress();
        } catch (const std::exception& error) {  // it is thrown where a thread waits
          publish_failure(GroupFailure::aborted, rank_, error.what());
          alone = false;
        }
        alone = alone && under_way_ > 0;
      }
      idle_looks = alone ? 0 : idle_looks + 1;
      if (idle_looks > looks_until_rest) watching_ = false;
      resting = !watching_;
    }
    if (alone) {
      auto& waiters = own().arrival_waiters;
      waiters.fetch_add(1, std::memory_order_seq_cst);
      futex_wait(own().arrivals, seen, look_interval_ns);
      waiters.fetch_sub(1, std::memory_order_relaxed);
    } else {
      futex_wait(wake_ups_, wake_ups, resting ? 10 * look_interval_ns : look_again_ns);
    }
  }
}

// Tells a rank that a packet was written or read.
void HostGroup::signal(std::size_t peer) noexcept {
  SegmentHeader& header = peers_[peer].segment->header();
  header.arrivals.fetch_add(1, std::memory_order_seq_cst);
  if (header.arrival_waiters.load(std::memory_order_seq_cst) != 0) futex_wake(header.arrivals);
}

void HostGroup::need_peer(int peer) const {
  need_root(peer);
  if (peer == rank_)
    throw GroupError(GroupFailure::usage, peer,
                     "rank " + std::to_string(peer) + " cannot exchange messages with itself");
}

}  // namespace paceline
