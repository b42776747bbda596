// The collectives of HostGroup, as chunks that go through slots or are read in place.
#include <algorithm>
#include <cstring>
#include <utility>

#include "host_call.hpp"

namespace paceline {
namespace {

constexpr std::uint64_t not_in_heap = UINT64_MAX;
constexpr std::size_t in_place_block_bytes = std::size_t{32} << 10;

std::size_t divided_up(std::size_t amount, std::size_t unit) { return (amount + unit - 1) / unit; }

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0 || to == from) return;
  static const CopyKernel kernel = copy_kernel();
  kernel(to, from, bytes);
}

}  // namespace

// Into a target of `total` bytes of which nothing is in the cache: not read before it is written.
void HostGroup::copy_out(std::byte* to, const std::byte* from, std::size_t bytes,
                         std::size_t total) const {
  if (total < options_.past_cache_bytes) return copy_bytes(to, from, bytes);
  static const CopyKernel copy = copy_kernel_past_cache();
  if (bytes != 0 && to != from) copy(to, from, bytes);
}

// Out of a slot of another rank that no other rank reads.
void HostGroup::take_out(std::byte* to, std::byte* from, std::size_t bytes,
                         std::size_t total) const {
  if (!options_.take_lines) return copy_out(to, from, bytes, total);
  static const TakeKernel take = take_kernel();
  static const TakeKernel take_past_cache = take_kernel_past_cache();
  if (bytes != 0) (total < options_.past_cache_bytes ? take : take_past_cache)(to, from, bytes);
}

// What all other ranks read. Only a single reader takes the lines: its stores would race with the
// reads of others, even though they change nothing.
void HostGroup::copy_from(std::size_t peer, const Chunk& chunk, std::byte* to, std::size_t bytes,
                          std::size_t total) const {
  if (peers_.size() == 2) return take_out(to, slot(peer, chunk), bytes, total);
  copy_out(to, slot(peer, chunk), bytes, total);
}

// A part of an all-reduce of `total` bytes: from past_cache_bytes on the C library's copy is the faster
// one (bench/LOG.md).
void HostGroup::copy_part(std::byte* to, const std::byte* from, std::size_t bytes,
                          std::size_t total) const {
  if (total < options_.past_cache_bytes) return copy_bytes(to, from, bytes);
  if (bytes != 0) std::memcpy(to, from, bytes);
}

// Whole cache lines for each rank, so that no two ranks write to one.
HostGroup::Share HostGroup::share_of(std::size_t peer, std::size_t chunk_bytes) const {
  const std::size_t lines = divided_up(chunk_bytes, cache_line_bytes);
  const std::size_t bytes = divided_up(lines, peers_.size()) * cache_line_bytes;
  const std::size_t offset = std::min(peer * bytes, chunk_bytes);
  return {offset, std::min(bytes, chunk_bytes - offset)};
}

// The window, the chunk that is written, and what does not fit at the end of the ring.
std::size_t HostGroup::chunk_limit() const {
  const std::size_t most = peers_[index_].segment->ring().size() / (window_chunks + 2);
  return std::min(options_.chunk_bytes, most) / cache_line_bytes * cache_line_bytes;
}

std::uint64_t HostGroup::heap_offset_of(const std::byte* data, std::size_t bytes) const noexcept {
  const std::span<std::byte> heap = peers_[index_].segment->heap();
  if (data < heap.data() || data + bytes > heap.data() + heap.size()) return not_in_heap;
  return static_cast<std::uint64_t>(data - heap.data());
}

// All-reduce

void HostGroup::all_reduce(std::byte* data, std::size_t count, DType dtype, ReduceOp op,
                           double timeout_s) {
  const ReductionKernel reduction = kernel(dtype, op);
  const Call call(*this, {Operation::all_reduce, count, -1, dtype, op}, timeout_s);
  const std::size_t bytes = count * size_bytes(dtype);
  if (bytes <= std::min(options_.eager_bytes, chunk_limit()))
    return all_reduce_eager(data, count, dtype, reduction);
  read_heap_offsets(announce(heap_offset_of(data, bytes)));
  for (const std::uint64_t offset : heap_offsets_)
    if (offset == not_in_heap) return all_reduce_staged(data, count, dtype, reduction);
  all_reduce_in_place(data, count, dtype, reduction);
}

void HostGroup::read_heap_offsets(std::uint64_t number) {
  heap_offsets_.resize(peers_.size());
  for (std::size_t peer = 0; peer < peers_.size(); ++peer)
    heap_offsets_[peer] = announced(peer, number);
}

// Every rank stages all of its data and reduces everything: a single wait.
void HostGroup::all_reduce_eager(std::byte* data, std::size_t count, DType dtype,
                                 ReductionKernel reduction) {
  const std::size_t bytes = count * size_bytes(dtype);
  const Chunk chunk = next_chunk(bytes);
  copy_bytes(own_slot(chunk), data, bytes);
  publish_staged(chunk);
  await_all_staged(chunk);
  sources_.clear();
  for (std::size_t peer = 0; peer < peers_.size(); ++peer)
    sources_.push_back(peer == index_ ? data : slot(peer, chunk));
  std::byte* const targets[] = {data, slot((index_ + 1) % peers_.size(), chunk)};
  const std::size_t target_count = peers_.size() == 2 && options_.take_lines ? 2 : 1;
  reduction({sources_.data(), sources_.size(), targets, target_count, count});
}

// Each rank reduces its share of a chunk. The next chunk is staged before this one is reduced, and
// the one before is collected after it: what a rank waits for was mostly done some time ago.
void HostGroup::all_reduce_staged(std::byte* data, std::size_t count, DType dtype,
                                  ReductionKernel reduction) {
  const std::size_t bytes = count * size_bytes(dtype);
  std::optional<StagedPart> previous;
  StagedPart part = stage_for_all(data, bytes, 0);
  for (std::size_t at = part.bytes; at < bytes; at += part.bytes) {
    const StagedPart next = stage_for_all(data, bytes, at);
    reduce_share(part, dtype, reduction);
    if (previous) collect_shares(*previous);
    previous = std::exchange(part, next);
  }
  reduce_share(part, dtype, reduction);
  if (previous) collect_shares(*previous);
  collect_shares(part);
}

HostGroup::StagedPart HostGroup::stage_for_all(std::byte* data, std::size_t bytes,
                                               std::size_t at) {
  const std::size_t part_bytes = std::min(chunk_limit(), bytes - at);
  const StagedPart part{data + at, part_bytes, bytes, next_chunk(part_bytes)};
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peer == index_) continue;
    const Share share = share_of(peer, part.bytes);
    copy_part(own_slot(part.chunk) + share.offset, part.data + share.offset, share.bytes, bytes);
  }
  publish_staged(part.chunk);
  return part;
}

void HostGroup::reduce_share(const StagedPart& part, DType dtype, ReductionKernel reduction) {
  await_all_staged(part.chunk);
  const Share share = share_of(index_, part.bytes);
  sources_.clear();
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    const std::byte* from =
        peer == index_ ? part.data : slot(peer, part.chunk);
    sources_.push_back(from + share.offset);
  }
  std::byte* const targets[] = {part.data + share.offset, reduced_share(index_, part)};
  reduction({sources_.data(), sources_.size(), targets, 2, share.bytes / size_bytes(dtype)});
  publish(own().progress.reduced, part.chunk.number + 1);
}

// A rank's share of the result takes the place of what the next rank staged for it, and which it alone
// has read. In its own slot it would write to lines that it owns and others have read, which is slow
// (take_kernel); and the next rank has read them when it stages there again.
std::byte* HostGroup::reduced_share(std::size_t peer, const StagedPart& part) const noexcept {
  const std::size_t next = (peer + 1) % peers_.size();
  return slot(next, part.chunk) + share_of(peer, part.bytes).offset;
}

void HostGroup::collect_shares(const StagedPart& part) {
  for (std::size_t step = 1; step < peers_.size(); ++step) {
    const std::size_t peer = (index_ + step) % peers_.size();
    await_reduced(peer, part.chunk);
    const Share share = share_of(peer, part.bytes);
    copy_part(part.data + share.offset, reduced_share(peer, part), share.bytes, part.total);
  }
  finish(part.chunk);
}

// Everybody's data lies in its segment: each rank reduces its share of all, into all.
void HostGroup::all_reduce_in_place(std::byte* data, std::size_t count, DType dtype,
                                    ReductionKernel reduction) {
  const Share share = share_of(index_, count * size_bytes(dtype));
  for (std::size_t at = 0; at < share.bytes; at += in_place_block_bytes)
    reduce_block(data, share.offset + at, std::min(in_place_block_bytes, share.bytes - at), true,
                 dtype, reduction);
  synchronise();
}

// Reduces bytes of all ranks' data, which lies in their segments, into this rank's or into all.
void HostGroup::reduce_block(std::byte* data, std::size_t offset, std::size_t bytes,
                             bool into_all, DType dtype, ReductionKernel reduction) {
  sources_.clear();
  targets_.clear();
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    std::byte* base =
        peer == index_ ? data : peers_[peer].segment->heap().data() + heap_offsets_[peer];
    sources_.push_back(base + offset);
    if (into_all || peer == index_) targets_.push_back(base + offset);
  }
  reduction({sources_.data(), sources_.size(), targets_.data(), targets_.size(),
             bytes / size_bytes(dtype)});
}

void HostGroup::need_in_heaps() const {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer)
    if (heap_offsets_[peer] == not_in_heap)
      throw GroupError(GroupFailure::usage, static_cast<int>(peer),
                       "the data of rank " + std::to_string(peer) + " is not in its heap");
}

// Nobody leaves before all have read what they reduce.
void HostGroup::reduce_scatter_in_place(std::byte* data, std::size_t count, DType dtype,
                                        ReduceOp op, double timeout_s) {
  const ReductionKernel reduction = kernel(dtype, op);
  if (count % peers_.size() != 0)
    throw GroupError(GroupFailure::usage, -1,
                     std::to_string(count) + " elements do not divide into " +
                         std::to_string(peers_.size()) + " equal parts");
  const Call call(*this, {Operation::reduce_scatter_in_place, count, -1, dtype, op}, timeout_s);
  const std::size_t bytes = count * size_bytes(dtype);
  read_heap_offsets(announce(heap_offset_of(data, bytes)));
  need_in_heaps();
  const std::size_t part = bytes / peers_.size();
  for (std::size_t at = 0; at < part; at += in_place_block_bytes)
    reduce_block(data, index_ * part + at, std::min(in_place_block_bytes, part - at), false,
                 dtype, reduction);
  synchronise();
}

// The ranks say in their slots where their data lies, and go on.
void HostGroup::reduce_in_place(std::byte* data, std::size_t count, DType dtype, ReduceOp op,
                                int root, double timeout_s) {
  need_root(root);
  const ReductionKernel reduction = kernel(dtype, op);
  const std::size_t bytes = count * size_bytes(dtype);
  const std::uint64_t heap_offset = heap_offset_of(data, bytes);
  if (heap_offset == not_in_heap)
    throw GroupError(GroupFailure::usage, rank_,
                     "the data of rank " + std::to_string(rank_) + " is not in its heap");
  const Call call(*this, {Operation::reduce_in_place, count, root, dtype, op}, timeout_s);
  const Chunk chunk = next_chunk(sizeof heap_offset);
  std::memcpy(own_slot(chunk), &heap_offset, sizeof heap_offset);
  publish_staged(chunk);
  if (rank_ == root) {
    await_all_staged(chunk);
    heap_offsets_.resize(peers_.size());
    for (std::size_t peer = 0; peer < peers_.size(); ++peer)
      std::memcpy(&heap_offsets_[peer], slot(peer, chunk), sizeof heap_offset);
    for (std::size_t at = 0; at < bytes; at += in_place_block_bytes)
      reduce_block(data, at, std::min(in_place_block_bytes, bytes - at), false, dtype,
                   reduction);
  }
  finish(chunk);
}

// Reduce and broadcast

void HostGroup::reduce(std::byte* data, std::size_t count, DType dtype, ReduceOp op, int root,
                       double timeout_s) {
  need_root(root);
  const ReductionKernel reduction = kernel(dtype, op);
  const Call call(*this, {Operation::reduce, count, root, dtype, op}, timeout_s);
  const std::size_t bytes = count * size_bytes(dtype);
  const std::size_t limit = chunk_limit();
  for (std::size_t at = 0; at == 0 || at < bytes; at += limit) {
    const std::size_t part = std::min(limit, bytes - at);
    const Chunk chunk = next_chunk(part);
    if (rank_ != root) {
      copy_bytes(own_slot(chunk), data + at, part);
      publish_staged(chunk);
    } else {
      publish_staged(chunk);
      await_all_staged(chunk);
      reduce_slots(data + at, data + at, chunk, 0, part / size_bytes(dtype), reduction);
    }
    finish(chunk);
  }
}

// What this rank alone reads, at an offset in all other ranks' slots; it takes the lines by writing the
// results there, too.
void HostGroup::reduce_slots(const std::byte* source, std::byte* target, const Chunk& chunk,
                             std::size_t offset, std::size_t count, ReductionKernel reduction) {
  sources_.clear();
  targets_.assign(1, target);
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    std::byte* const staged = slot(peer, chunk) + offset;
    if (peer != index_ && options_.take_lines) targets_.push_back(staged);
    sources_.push_back(peer == index_ ? source : staged);
  }
  reduction({sources_.data(), sources_.size(), targets_.data(), targets_.size(), count});
}

void HostGroup::broadcast(std::byte* data, std::size_t bytes, int root, double timeout_s) {
  need_root(root);
  const Call call(*this, {Operation::broadcast, bytes, root}, timeout_s);
  const auto source = static_cast<std::size_t>(root);
  const std::size_t limit = chunk_limit();
  for (std::size_t at = 0; at == 0 || at < bytes; at += limit) {
    const std::size_t part = std::min(limit, bytes - at);
    const Chunk chunk = next_chunk(part);
    if (rank_ == root) copy_bytes(own_slot(chunk), data + at, part);
    publish_staged(chunk);
    if (rank_ != root) {
      await_staged(source, chunk);
      copy_from(source, chunk, data + at, part, bytes);
    }
    finish(chunk);
  }
}

// Reduce-scatter and all-gather

void HostGroup::reduce_scatter(const std::byte* source, std::byte* target,
                               std::size_t count_per_rank, DType dtype, ReduceOp op,
                               double timeout_s) {
  const ReductionKernel reduction = kernel(dtype, op);
  const Call call(*this, {Operation::reduce_scatter, count_per_rank, -1, dtype, op}, timeout_s);
  const std::size_t bytes = count_per_rank * size_bytes(dtype);
  const std::size_t lane = lane_bytes(bytes);
  for (std::size_t at = 0; at == 0 || at < bytes; at += lane) {
    const std::size_t part = std::min(lane, bytes - at);
    const Chunk chunk = next_chunk(lane * peers_.size());
    for (std::size_t peer = 0; peer < peers_.size(); ++peer)
      if (peer != index_)
        copy_bytes(own_slot(chunk) + peer * lane, source + peer * bytes + at, part);
    publish_staged(chunk);
    await_all_staged(chunk);
    reduce_slots(source + index_ * bytes + at, target + at, chunk, index_ * lane,
                 part / size_bytes(dtype), reduction);
    finish(chunk);
  }
}

// What of a chunk is for each rank, when each gets at most `bytes` in all.
std::size_t HostGroup::lane_bytes(std::size_t bytes) const {
  const std::size_t lines = std::max(chunk_limit() / peers_.size() / cache_line_bytes,
                                     std::size_t{1});
  const std::size_t needed = std::max(divided_up(bytes, cache_line_bytes), std::size_t{1});
  return std::min(lines, needed) * cache_line_bytes;
}

void HostGroup::all_gather(const std::byte* source, std::byte* target, std::size_t bytes_per_rank,
                           double timeout_s) {
  const Call call(*this, {Operation::all_gather, bytes_per_rank}, timeout_s);
  const std::size_t limit = chunk_limit();
  const std::size_t total = bytes_per_rank * peers_.size();
  for (std::size_t at = 0; at == 0 || at < bytes_per_rank; at += limit) {
    const std::size_t part = std::min(limit, bytes_per_rank - at);
    const Chunk chunk = next_chunk(part);
    copy_bytes(own_slot(chunk), source + at, part);
    publish_staged(chunk);
    copy_out(target + index_ * bytes_per_rank + at, source + at, part, total);
    for (std::size_t step = 1; step < peers_.size(); ++step) {
      const std::size_t peer = (index_ + step) % peers_.size();
      await_staged(peer, chunk);
      copy_from(peer, chunk, target + peer * bytes_per_rank + at, part, total);
    }
    finish(chunk);
  }
}

// All-to-all, gather and scatter

void HostGroup::all_to_all(const std::byte* source, std::byte* target,
                           std::span<const std::size_t> send_bytes,
                           std::span<const std::size_t> receive_bytes, double timeout_s) {
  if (send_bytes.size() != peers_.size() || receive_bytes.size() != peers_.size())
    throw GroupError(GroupFailure::usage, -1,
                     "all_to_all takes one size per rank: the group has " +
                         std::to_string(peers_.size()) + " ranks");
  const Call call(*this, {Operation::all_to_all}, timeout_s);
  const std::uint64_t number = announce(*std::max_element(send_bytes.begin(), send_bytes.end()));
  std::size_t most = 0;
  for (std::size_t peer = 0; peer < peers_.size(); ++peer)
    most = std::max<std::size_t>(most, announced(peer, number));
  const std::size_t lane = lane_bytes(most);
  for (std::size_t at = 0; at < most; at += lane) {
    const auto part = [&](std::size_t bytes) {
      return at < bytes ? std::min(lane, bytes - at) : std::size_t{0};
    };
    const Chunk chunk = next_chunk(lane * peers_.size());
    const std::byte* from = source;
    for (std::size_t peer = 0; peer < peers_.size(); from += send_bytes[peer++])
      if (peer != index_)
        copy_bytes(own_slot(chunk) + peer * lane, from + at, part(send_bytes[peer]));
    publish_staged(chunk);
    from = source;
    for (std::size_t peer = 0; peer < index_; ++peer) from += send_bytes[peer];
    std::byte* to = target;
    for (std::size_t peer = 0; peer < peers_.size(); to += receive_bytes[peer++]) {
      const std::size_t received = part(receive_bytes[peer]);
      if (peer == index_) {
        copy_bytes(to + at, from + at, received);
      } else {
        await_staged(peer, chunk);
        take_out(to + at, slot(peer, chunk) + index_ * lane, received);
      }
    }
    finish(chunk);
  }
}

void HostGroup::gather(const std::byte* source, std::byte* target, std::size_t bytes, int root,
                       double timeout_s) {
  need_root(root);
  const Call call(*this, {Operation::gather, bytes, root}, timeout_s);
  const std::size_t limit = chunk_limit();
  for (std::size_t at = 0; at == 0 || at < bytes; at += limit) {
    const std::size_t part = std::min(limit, bytes - at);
    const Chunk chunk = next_chunk(part);
    if (rank_ != root) copy_bytes(own_slot(chunk), source + at, part);
    publish_staged(chunk);
    for (std::size_t peer = 0; rank_ == root && peer < peers_.size(); ++peer) {
      if (peer == index_) {
        copy_bytes(target + peer * bytes + at, source + at, part);
      } else {
        await_staged(peer, chunk);
        take_out(target + peer * bytes + at, slot(peer, chunk), part);
      }
    }
    finish(chunk);
  }
}

void HostGroup::scatter(const std::byte* source, std::byte* target, std::size_t bytes, int root,
                        double timeout_s) {
  need_root(root);
  const Call call(*this, {Operation::scatter, bytes, root}, timeout_s);
  const auto root_index = static_cast<std::size_t>(root);
  const std::size_t lane = lane_bytes(bytes);
  for (std::size_t at = 0; at == 0 || at < bytes; at += lane) {
    const std::size_t part = std::min(lane, bytes - at);
    const Chunk chunk = next_chunk(lane * peers_.size());
    for (std::size_t peer = 0; rank_ == root && peer < peers_.size(); ++peer)
      if (peer != index_)
        copy_bytes(own_slot(chunk) + peer * lane, source + peer * bytes + at, part);
    publish_staged(chunk);
    if (rank_ == root) {
      copy_bytes(target + at, source + index_ * bytes + at, part);
    } else {
      await_staged(root_index, chunk);
      take_out(target + at, slot(root_index, chunk) + index_ * lane, part);
    }
    finish(chunk);
  }
}

void HostGroup::barrier(double timeout_s) {
  const Call call(*this, {Operation::barrier}, timeout_s);
  synchronise();
}

}  // namespace paceline
