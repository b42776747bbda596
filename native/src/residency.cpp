#include "paceline/residency.hpp"

namespace paceline {
namespace {

class NoResidency final : public Residency {
 public:
  bool resident(std::span<const std::byte> /*bytes*/, bool /*confirm*/) const noexcept override {
    return false;
  }
  bool trusted(std::span<const std::byte> /*bytes*/) const noexcept override { return false; }
  void note_resident(std::span<const std::byte> /*bytes*/) noexcept override {}
  void trust(std::span<const std::byte> /*bytes*/) noexcept override {}
  void expect_faults(std::span<const std::byte> /*bytes*/) noexcept override {}
  void invalidate_around(std::span<const std::byte> /*bytes*/) noexcept override {}
  void invalidate_all() noexcept override {}
  void age() noexcept override {}
};

}  // namespace

std::unique_ptr<Residency> verify_always(std::span<const std::byte> /*mapping*/) {
  return std::make_unique<NoResidency>();
}

}  // namespace paceline
