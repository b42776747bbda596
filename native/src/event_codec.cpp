#include "paceline/event_codec.hpp"

#include <cstring>
#include <vector>

#include "paceline/recorder.hpp"

namespace paceline {
namespace {

// What an event is, apart from when it was and how large: all fields from `peer` on. Events of one
// shape mostly come in a fixed order, have one amount, and are numbered one after the other.
struct Shape {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  std::uint64_t amount = 0;    // of its last event
  std::uint32_t sequence = 0;  // of its last event
  std::uint32_t next = 0;      // the shape that last followed it
};
constexpr std::size_t shape_at = offsetof(Event, peer);
static_assert(shape_at + 2 * sizeof(std::uint64_t) == sizeof(Event));

// The first byte of an event: how its shape is given, and which fields are not as expected.
constexpr unsigned shape_follows = 0;  // the one that last followed the shape before
constexpr unsigned shape_numbered = 1;
constexpr unsigned shape_new = 2;
constexpr unsigned shape_mask = 3;
constexpr unsigned step_differs = 4;
constexpr unsigned amount_differs = 8;
constexpr unsigned sequence_differs = 16;
constexpr unsigned all_bits = 31;

constexpr std::size_t event_bytes_max = 64;  // of one event, packed

std::uint64_t zigzag(std::uint64_t difference) {
  return (difference << 1) ^ (0 - (difference >> 63));
}

std::uint64_t unzigzag(std::uint64_t coded) { return (coded >> 1) ^ (0 - (coded & 1)); }

std::uint64_t widened(std::uint32_t difference) {
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(static_cast<std::int32_t>(difference)));
}

std::uint32_t expected_sequence(const Shape& shape) {
  return shape.sequence == 0 ? 0 : shape.sequence + 1;
}

char* put(char* at, std::uint64_t value) {
  while (value >= 0x80) {
    *at++ = static_cast<char>(value | 0x80);
    value >>= 7;
  }
  *at++ = static_cast<char>(value);
  return at;
}

// The numbers of shapes, found by their fields: open addressing, at most half full.
class Shapes {
 public:
  Shapes() : shapes_(1), slots_(256, 0) {}  // shape 0 stands before the first event

  Shape& operator[](std::size_t number) { return shapes_[number]; }

  // The number of a shape, which is added if it is new.
  std::uint32_t number(std::uint64_t low, std::uint64_t high, bool& fresh) {
    std::size_t slot = slot_of(low, high);
    while (slots_[slot] != 0) {
      const Shape& shape = shapes_[slots_[slot]];
      if (shape.low == low && shape.high == high) {
        fresh = false;
        return slots_[slot];
      }
      slot = (slot + 1) & (slots_.size() - 1);
    }
    fresh = true;
    const auto number = static_cast<std::uint32_t>(shapes_.size());
    shapes_.push_back({.low = low, .high = high});
    slots_[slot] = number;
    if (2 * shapes_.size() > slots_.size()) grow();
    return number;
  }

 private:
  std::size_t slot_of(std::uint64_t low, std::uint64_t high) const {
    std::uint64_t mixed = (low ^ (high << 23 | high >> 41)) * 0x9E3779B97F4A7C15U;
    mixed ^= mixed >> 32;
    return mixed & (slots_.size() - 1);
  }

  void grow() {
    slots_.assign(2 * slots_.size(), 0);
    for (std::size_t number = 1; number < shapes_.size(); ++number) {
      std::size_t slot = slot_of(shapes_[number].low, shapes_[number].high);
      while (slots_[slot] != 0) slot = (slot + 1) & (slots_.size() - 1);
      slots_[slot] = static_cast<std::uint32_t>(number);
    }
  }

  std::vector<Shape> shapes_;
  std::vector<std::uint32_t> slots_;  // a number of a shape, or 0
};

// Reads numbers of any length until the bytes end.
class Cursor {
 public:
  Cursor(const void* data, std::size_t size)
      : at_(static_cast<const std::uint8_t*>(data)), end_(at_ + size) {}

  bool byte(std::uint8_t& value) {
    if (at_ == end_) return false;
    value = *at_++;
    return true;
  }

  bool get(std::uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      if (at_ == end_) return false;
      const std::uint8_t byte = *at_++;
      if (shift == 63 && byte > 1) return false;
      value |= static_cast<std::uint64_t>(byte & 0x7F) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  bool at_end() const { return at_ == end_; }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

}  // namespace

std::string pack_events(const Event* events, std::size_t count) {
  Shapes shapes;
  std::string packed;
  std::size_t used = 0;
  std::uint32_t last = 0;
  std::uint32_t step = 0;
  std::uint64_t end_ns = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Event& event = events[i];
    if (packed.size() - used < event_bytes_max) {
      packed.resize(2 * packed.size() + 64 * event_bytes_max);
    }
    char* const first = packed.data() + used;
    char* at = first + 1;
    std::uint64_t fields[2];
    std::memcpy(fields, reinterpret_cast<const char*>(&event) + shape_at, sizeof fields);
    unsigned control = shape_follows;
    std::uint32_t number = shapes[last].next;
    if (number == 0 || shapes[number].low != fields[0] || shapes[number].high != fields[1]) {
      bool fresh = false;
      number = shapes.number(fields[0], fields[1], fresh);
      control = fresh ? shape_new : shape_numbered;
      if (fresh) {
        std::memcpy(at, fields, sizeof fields);
        at += sizeof fields;
      } else {
        at = put(at, number);
      }
    }
    shapes[last].next = number;
    last = number;
    Shape& shape = shapes[number];
    if (event.step != step) {
      control |= step_differs;
      at = put(at, zigzag(widened(event.step - step)));
      step = event.step;
    }
    if (event.amount != shape.amount) {
      control |= amount_differs;
      at = put(at, zigzag(event.amount - shape.amount));
      shape.amount = event.amount;
    }
    if (event.sequence != expected_sequence(shape)) {
      control |= sequence_differs;
      at = put(at, zigzag(widened(event.sequence - expected_sequence(shape))));
    }
    shape.sequence = event.sequence;
    at = put(at, zigzag(event.end_ns - end_ns));
    at = put(at, zigzag(event.end_ns - event.begin_ns));
    end_ns = event.end_ns;
    *first = static_cast<char>(control);
    used += static_cast<std::size_t>(at - first);
  }
  packed.resize(used);
  return packed;
}

bool unpack_events(const void* data, std::size_t size, Event* events, std::size_t count) {
  Cursor cursor(data, size);
  std::vector<Shape> shapes(1);
  std::uint64_t last = 0;
  std::uint32_t step = 0;
  std::uint64_t end_ns = 0;
  for (std::size_t i = 0; i < count; ++i) {
    std::uint8_t control = 0;
    std::uint64_t number = shapes[last].next;
    if (!cursor.byte(control) || control > all_bits) return false;
    switch (control & shape_mask) {
      case shape_follows: break;
      case shape_numbered:
        if (!cursor.get(number)) return false;
        break;
      case shape_new: {
        std::uint8_t bytes[16];
        for (std::uint8_t& byte : bytes) {
          if (!cursor.byte(byte)) return false;
        }
        number = shapes.size();
        Shape shape;
        std::memcpy(&shape.low, bytes, 8);
        std::memcpy(&shape.high, bytes + 8, 8);
        shapes.push_back(shape);
        break;
      }
      default: return false;
    }
    if (number == 0 || number >= shapes.size()) return false;
    shapes[last].next = static_cast<std::uint32_t>(number);
    last = number;
    Shape& shape = shapes[number];
    std::uint64_t coded = 0;
    if ((control & step_differs) != 0) {
      if (!cursor.get(coded)) return false;
      step += static_cast<std::uint32_t>(unzigzag(coded));
    }
    if ((control & amount_differs) != 0) {
      if (!cursor.get(coded)) return false;
      shape.amount += unzigzag(coded);
    }
    std::uint32_t sequence = expected_sequence(shape);
    if ((control & sequence_differs) != 0) {
      if (!cursor.get(coded)) return false;
      sequence += static_cast<std::uint32_t>(unzigzag(coded));
    }
    shape.sequence = sequence;
    if (!cursor.get(coded)) return false;
    end_ns += unzigzag(coded);
    if (!cursor.get(coded)) return false;
    Event& event = events[i];
    event.begin_ns = end_ns - unzigzag(coded);
    event.end_ns = end_ns;
    event.amount = shape.amount;
    event.step = step;
    event.sequence = sequence;
    const std::uint64_t fields[2] = {shape.low, shape.high};
    std::memcpy(reinterpret_cast<char*>(&event) + shape_at, fields, sizeof fields);
  }
  return cursor.at_end();
}

}  // namespace paceline
