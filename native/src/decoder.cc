#include "decoder.h"

#include <algorithm>

#include "unicode.h"

namespace dagserve {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

char* append(std::string_view text, char* out) { return std::copy(text.begin(), text.end(), out); }

// Copies `text`; every maximal part that is not UTF-8 becomes U+FFFD (The Unicode Standard, 3.9).
char* append_lossy(std::string_view text, char* out) {
  while (!text.empty()) {
    const std::size_t wrong = find_invalid_utf8(text);
    out = append(text.substr(0, wrong), out);
    if (wrong == std::string_view::npos) break;
    text.remove_prefix(wrong);
    text.remove_prefix(broken_bytes(text));
    out = append(kReplacement, out);
  }
  return out;
}

}  // namespace

Decoder::Decoder(const Tables& tables)
    : head_(*reinterpret_cast<const Head*>(tables.section(Section::decoding).data())),
      ends_(reinterpret_cast<const std::uint32_t*>(tables.section(Section::token_ends).data())),
      texts_(tables.section(Section::token_texts)) {
  const std::string_view flags = tables.section(Section::token_flags);
  flags_ = {reinterpret_cast<const unsigned char*>(flags.data()), flags.size()};
}

std::size_t Decoder::decode(std::span<const std::int64_t> ids, Shown shown, std::span<std::byte> workspace,
                            char* out) const {
  char* const joined = reinterpret_cast<char*>(workspace.data());
  char* joined_end = joined;
  char* end = out;
  // A run of bytes is text where it is UTF-8, else one U+FFFD for each byte.
  const auto flush_bytes = [&] {
    const std::string_view run(joined, static_cast<std::size_t>(joined_end - joined));
    if (find_invalid_utf8(run) == std::string_view::npos)
      end = append(run, end);
    else
      for (std::size_t i = 0; i < run.size(); ++i) end = append(kReplacement, end);
    joined_end = joined;
  };
  for (const std::int64_t id : ids) {
    if (hidden(id, shown)) continue;
    if (head_.byte_level != 0 || (flags_[static_cast<std::size_t>(id)] & kByte) != 0) {
      joined_end = append(token(id), joined_end);
    } else {
      flush_bytes();
      end = append(token(id), end);
    }
  }
  if (head_.byte_level != 0) {
    end = append_lossy({joined, static_cast<std::size_t>(joined_end - joined)}, end);
  } else {
    flush_bytes();
  }
  const auto written = static_cast<std::size_t>(end - out);
  const std::size_t spaces = std::min<std::size_t>(std::string_view(out, written).find_first_not_of(' '), written);
  const std::size_t stripped = std::min<std::size_t>(head_.strip, spaces);
  if (stripped > 0) std::copy(out + stripped, end, out);
  return written - stripped;
}

}  // namespace dagserve
