#include "json_place.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "unicode.h"

namespace dagserve {
namespace {

constexpr std::size_t kDeepest = 8;

// An object or a list that is open at a byte.
struct Level {
  bool list = false;
  bool before_key = true;
  std::int64_t index = 0;
  std::string_view key;
};

// The closing quote of the string that opens at `start`, or the text's end.
std::size_t string_end(std::string_view text, std::size_t start) {
  std::size_t at = start + 1;
  while (at < text.size() && text[at] != '"') at += text[at] == '\\' ? 2 : 1;
  return std::min(at, text.size());
}

// The levels open at the end of a text; of deeper ones the outermost are kept.
struct Levels {
  Level level[kDeepest];
  std::size_t depth = 0;

  Level* top() { return depth == 0 || depth > kDeepest ? nullptr : &level[depth - 1]; }

  void open(bool list) {
    if (depth < kDeepest) {
      level[depth] = Level();
      level[depth].list = list;
    }
    ++depth;
  }
  void next() {
    Level* const here = top();
    if (here == nullptr) return;
    ++here->index;
    here->before_key = true;
  }
  void name(std::string_view key) {
    Level* const here = top();
    if (here == nullptr || here->list || !here->before_key) return;
    here->key = key;
    here->before_key = false;
  }
};

Levels levels_of(std::string_view text) {
  Levels levels;
  for (std::size_t at = 0; at < text.size(); ++at) {
    switch (text[at]) {
      case '{':
      case '[':
        levels.open(text[at] == '[');
        break;
      case '}':
      case ']':
        levels.depth -= levels.depth > 0;
        break;
      case ',':
        levels.next();
        break;
      case '"': {
        const std::size_t end = string_end(text, at);
        if (end < text.size()) levels.name(text.substr(at + 1, end - at - 1));
        at = end;
        break;
      }
      default:
        break;
    }
  }
  return levels;
}

}  // namespace

void json_place(std::string_view text, std::size_t offset, std::span<char> out) noexcept {
  const Levels levels = levels_of(text.substr(0, offset));
  std::size_t used = 0;
  out[0] = 0;
  for (std::size_t i = 0; i < std::min(levels.depth, kDeepest); ++i) {
    const Level& level = levels.level[i];
    const std::size_t left = out.size() - used;
    const int length = level.list
                           ? std::snprintf(out.data() + used, left, "[%lld]", static_cast<long long>(level.index))
                           : std::snprintf(out.data() + used, left, "%s%.*s", used && !level.key.empty() ? "." : "",
                                           static_cast<int>(level.key.size()), level.key.data());
    if (length < 0 || static_cast<std::size_t>(length) >= left) return;
    used += static_cast<std::size_t>(length);
  }
}

std::size_t find_bad_text(std::string_view text) noexcept {
  const std::size_t invalid = find_invalid_utf8(text);
  for (std::size_t at = 0; at < std::min(invalid, text.size()); ++at) {
    if (text[at] != '"') continue;
    const std::size_t end = string_end(text, at);
    for (std::size_t i = at + 1; i < std::min(end, invalid); ++i)
      if (static_cast<unsigned char>(text[i]) < 0x20) return i;
    at = end;
  }
  return invalid;
}

}  // namespace dagserve
