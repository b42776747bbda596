// What is fetched for samples whose shards are elsewhere: samples of one extent, of two, of none, and one
// that is compressed; delivered by hand and by a node.
#include "paceline/peer_server.hpp"
#include "paceline/extent_plan.hpp"

#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "paceline/codecs.hpp"
#include "paceline/crc32c.hpp"
#include "pack_builder.hpp"

using namespace paceline;

namespace {

const std::string plain(100'000, 'z');

PackBuilder make_pack() {
  std::string frame(zstd_bound(plain.size()), '\0');
  const auto* source = reinterpret_cast<const std::byte*>(plain.data());
  auto* target = reinterpret_cast<std::byte*>(frame.data());
  frame.resize(zstd_compress({source, plain.size()}, {target, frame.size()}, 3));
  PackBuilder builder({"first, ", "second", frame}, 1);
  builder.version2();
  builder.poke(Section::lengths, 2, std::uint64_t{plain.size()});
  builder.poke(Section::checksums, 2, crc32c(plain.data(), plain.size()));
  builder.set(Section::stored_lengths, std::vector<std::uint64_t>{7, 6, frame.size()});
  builder.set(Section::codecs, std::vector<std::uint8_t>{0, 0, 1});
  builder.set(Section::first_extents, std::vector<std::uint64_t>{0, 2, 2, 3});
  return builder;
}

// As if each extent came from a node that has `shards`.
std::vector<RangeOutcome> deliver(ExtentPlan& plan, const std::vector<std::string>& shards,
                                  std::span<std::byte> out) {
  std::vector<RangeOutcome> outcomes;
  for (std::size_t i = 0; i < plan.items().size(); ++i) {
    const WantedRange wanted = plan.wanted(i, out);
    std::memcpy(wanted.target, shards[wanted.shard].data() + wanted.range.offset, wanted.range.length);
    const bool is_good =
        !wanted.is_checked || crc32c(wanted.target, wanted.range.length) == wanted.checksum;
    outcomes.push_back(
        plan.finish(i, out, is_good ? RangeOutcome::good : RangeOutcome::damaged));
  }
  return outcomes;
}

void test_every_byte_arrives_in_its_place(const PackBuilder& builder, const PackReader& reader) {
  const std::vector<std::int64_t> ids{2, 0, 1, 0, 2};
  ExtentPlan plan(reader, ids);
  CHECK(plan.items().size() == 6);  // sample 1 is empty
  std::vector<std::byte> out(plan.size());
  for (const RangeOutcome outcome : deliver(plan, builder.shards, out)) {
    CHECK(outcome == RangeOutcome::good);
  }
  const std::string all(reinterpret_cast<const char*>(out.data()), out.size());
  CHECK(all == plain + "first, second" + "first, second" + plain);
  const std::vector<std::int64_t> offsets(plan.offsets().begin(), plan.offsets().end());
  CHECK((offsets == std::vector<std::int64_t>{0, 100'000, 100'013, 100'013, 100'026, 200'026}));
}

void test_a_flipped_bit_is_found(const PackBuilder& builder, const PackReader& reader) {
  const std::vector<std::int64_t> ids{0, 2};
  ExtentPlan plan(reader, ids);
  std::vector<std::byte> out(plan.size());
  for (std::size_t shard = 0; shard < 3; ++shard) {
    auto shards = builder.shards;
    shards[shard][sizeof(ShardHeader) + 3] ^= 4;
    const auto outcomes = deliver(plan, shards, out);
    for (std::size_t i = 0; i < outcomes.size(); ++i) {
      CHECK(outcomes[i] == (i == shard ? RangeOutcome::damaged : RangeOutcome::good));
    }
  }
  CHECK(plan.finish(2, out, RangeOutcome::not_held) == RangeOutcome::not_held);
  CHECK(plan.finish(2, out, RangeOutcome::missing) == RangeOutcome::missing);
}

void test_wrong_samples_are_refused(const PackReader& reader) {
  for (const std::int64_t sample : {std::int64_t{3}, std::int64_t{-1}}) {
    CHECK_THROWS(ExtentPlan(reader, std::vector<std::int64_t>{sample}), std::out_of_range);
  }
  CHECK(ExtentPlan(reader, std::vector<std::int64_t>{}).size() == 0);
}

void test_through_a_node(const TemporaryFolder& folder, const PackReader& reader) {
  PeerServer server(PeerServerOptions{});
  server.hold(0, folder / "pack/shard-00000.pace");
  server.hold(2, folder / "pack/shard-00002.pace");
  PeerLink link;
  std::string card;
  CHECK(link.connect("127.0.0.1", server.port(), {}, {}, 10'000'000'000, card).kind ==
        PeerError::Kind::none);
  const std::vector<std::int64_t> ids{0, 2};
  ExtentPlan plan(reader, ids);
  std::vector<std::byte> out(plan.size());
  std::vector<WantedRange> wanted;
  for (std::size_t i = 0; i < plan.items().size(); ++i) wanted.push_back(plan.wanted(i, out));
  std::vector<RangeOutcome> outcomes(wanted.size());
  CHECK(link.fetch(wanted, outcomes, 10'000'000'000, [] { return false; }).kind ==
        PeerError::Kind::none);
  for (std::size_t i = 0; i < outcomes.size(); ++i) outcomes[i] = plan.finish(i, out, outcomes[i]);
  CHECK((outcomes == std::vector<RangeOutcome>{RangeOutcome::good, RangeOutcome::not_held,
                                               RangeOutcome::good}));
  CHECK(std::memcmp(out.data(), "first, ", 7) == 0);
  CHECK(std::memcmp(out.data() + 13, plain.data(), plain.size()) == 0);
}

void test_a_claim_beyond_the_shard_is_refused(PackBuilder builder, const TemporaryFolder& folder) {
  builder.set(Section::stored_lengths, std::vector<std::uint64_t>{7, 6, std::uint64_t{1} << 62});
  builder.write(folder / "claims");
  const PackReader reader(folder / "claims");
  CHECK_THROWS(ExtentPlan(reader, std::vector<std::int64_t>{2}), PackError);
}

}  // namespace

int main() {
  const TemporaryFolder folder;
  const PackBuilder builder = make_pack();
  builder.write(folder / "pack");
  const PackReader reader(folder / "pack");
  test_every_byte_arrives_in_its_place(builder, reader);
  test_a_flipped_bit_is_found(builder, reader);
  test_wrong_samples_are_refused(reader);
  test_through_a_node(folder, reader);
  test_a_claim_beyond_the_shard_is_refused(builder, folder);
}
