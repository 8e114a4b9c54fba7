// JSON into a fixed buffer.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace dagserve {

// A JSON string with its quotes: escapes what JSON demands and nothing else. Allocates: load time only.
inline std::string json_string(std::string_view text) {
  static constexpr std::string_view kShort = "\"\\\b\f\n\r\t";
  static constexpr std::string_view kLetters = "\"\\bfnrt";
  std::string quoted = "\"";
  for (const char c : text) {
    if (const auto i = kShort.find(c); i != std::string_view::npos) {
      quoted += '\\';
      quoted += kLetters[i];
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      quoted += escaped;
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

// Appends to a fixed buffer; once something does not fit, nothing more is written.
class JsonWriter {
 public:
  JsonWriter(char* begin, std::int64_t capacity) : begin_(begin), position_(begin), end_(begin + capacity) {}

  void text(std::string_view part) {
    if (full_ || end_ - position_ < std::ssize(part)) {
      full_ = true;
      return;
    }
    position_ = std::copy(part.begin(), part.end(), position_);
  }
  // A string with its quotes.
  void string(std::string_view value) {
    text("\"");
    characters(value);
    text("\"");
  }
  // The inside of a string: runs without escapes are copied whole.
  void characters(std::string_view value) {
    std::size_t begin = 0;
    for (std::size_t i = 0; i < value.size(); ++i) {
      const char c = value[i];
      if (c != '"' && c != '\\' && static_cast<unsigned char>(c) >= 0x20) continue;
      text(value.substr(begin, i - begin));
      escape(c);
      begin = i + 1;
    }
    text(value.substr(begin));
  }
  template <class Number>
  void number(Number value) {
    const auto [next, error] = std::to_chars(position_, end_, value);
    full_ = full_ || error != std::errc();
    if (!full_) position_ = next;
  }
  // The shortest text that reads back as the same number; null where it is not finite.
  void real(float value) { std::isfinite(value) ? number(value) : text("null"); }

  bool full() const { return full_; }
  std::int64_t size() const { return position_ - begin_; }

 private:
  void escape(char c) {
    static constexpr std::string_view kHex = "0123456789abcdef";
    static constexpr std::string_view kShort = "\"\\\b\f\n\r\t";
    static constexpr std::string_view kLetters = "\"\\bfnrt";
    if (const auto i = kShort.find(c); i != std::string_view::npos) {
      const char pair[] = {'\\', kLetters[i]};
      return text({pair, 2});
    }
    const auto code = static_cast<unsigned char>(c);
    const char escaped[] = {'\\', 'u', '0', '0', kHex[code >> 4], kHex[code & 15]};
    text({escaped, sizeof(escaped)});
  }

  char* begin_;
  char* position_;
  char* end_;
  bool full_ = false;
};

}  // namespace dagserve
