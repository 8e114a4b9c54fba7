// Any bytes through the tokenizer and back, with exactly the workspace that it asks for, so that sanitizers see every
// byte too far. With clang a libFuzzer target; else built with DAGSERVE_FUZZ_MAIN it makes its own inputs on several
// threads:
//
//   tokenizer_fuzz TABLES THREADS INPUTS
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "decoder.h"
#include "tokenizer.h"
#include "unicode.h"

namespace {

using namespace dagserve;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// 64-byte aligned memory whose end is the end of an allocation.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : memory_(new std::byte[bytes + 64]) {
    void* start = memory_.get();
    std::size_t room = bytes + 64;
    if (std::align(64, bytes, start, room) == nullptr && bytes > 0) fail("no room");
    span_ = {static_cast<std::byte*>(start), bytes};
  }
  std::span<std::byte> span() const { return span_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::span<std::byte> span_;
};

std::vector<std::int64_t> encode(const Tokenizer& tokenizer, std::string_view text, std::span<const Open> open) {
  const Workspace workspace(tokenizer.workspace_bytes(text.size()));
  std::vector<std::int64_t> ids(8);
  TokenSink sink{ids.data(), 8, 0};  // too few on purpose: the sink counts on
  tokenizer.encode(text, open, workspace.span(), sink);
  ids.assign(static_cast<std::size_t>(sink.count), -1);
  TokenSink again{ids.data(), sink.count, 0};
  tokenizer.encode(text, open, workspace.span(), again);
  if (again.count != sink.count) fail("two runs gave different tokens");
  for (const std::int64_t id : ids)
    if (id < 0 || id >= tokenizer.tables().options().vocab_size) fail("a token outside the vocabulary");
  return ids;
}

void try_text(const Tokenizer& tokenizer, const Decoder& decoder, std::string_view text, std::size_t cut) {
  std::size_t middle = std::min(cut, text.size());
  while (middle > 0 && middle < text.size() && (static_cast<unsigned char>(text[middle]) & 0xC0) == 0x80) --middle;
  const Open all{0, text.size()};
  const Open parts[] = {{0, middle / 2}, {middle, text.size()}};
  std::vector<std::int64_t> ids = encode(tokenizer, text, {});
  const std::vector<std::int64_t> opened = encode(tokenizer, text, {&all, 1});
  std::size_t first = middle / 2;
  while (first > 0 && (static_cast<unsigned char>(text[first]) & 0xC0) == 0x80) --first;
  const Open whole_characters[] = {{0, first}, parts[1]};
  encode(tokenizer, text, whole_characters);
  ids.insert(ids.end(), opened.begin(), opened.end());
  std::reverse(ids.begin(), ids.end());  // partial characters in any order
  if (!decoder.supported()) return;
  const Workspace joining(decoder.most_bytes(ids.size()));
  const std::unique_ptr<char[]> out(new char[decoder.most_bytes(ids.size()) + 1]);
  const std::size_t written = decoder.decode(ids, {true, true}, joining.span(), out.get());
  if (find_invalid_utf8({out.get(), written}) != std::string_view::npos) fail("decoded text is not UTF-8");
}

void try_bytes(const Tokenizer& tokenizer, const Decoder& decoder, std::string_view bytes) {
  const std::size_t cut = bytes.empty() ? 0 : static_cast<unsigned char>(bytes[0]);
  const std::size_t wrong = find_invalid_utf8(bytes);
  try_text(tokenizer, decoder, bytes.substr(0, wrong), cut);
  if (wrong != std::string_view::npos && broken_bytes(bytes.substr(wrong)) == 0) fail("no progress over broken bytes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Tokenizer tokenizer(std::getenv("DAGSERVE_TABLES") ? std::getenv("DAGSERVE_TABLES") : "tokenizer.bin");
  static const Decoder decoder(tokenizer.tables());
  try_bytes(tokenizer, decoder, {reinterpret_cast<const char*>(data), size});
  return 0;
}

#ifdef DAGSERVE_FUZZ_MAIN
namespace {

std::string random_bytes(std::mt19937_64& source) {
  static const std::string kPieces[] = {"a",  "the ",    " ",  "\n",           "'s",    "12",     "日",
                                        "é",  "e\u0301", "👍", "<|im_start|>", "<a_1>", "\u2581", "\u1100\u1161\u11a8",
                                        "ab", "\xff"};
  std::string text;
  const std::size_t count = source() % 60;
  while (text.size() < count) {
    const std::uint64_t kind = source() % 8;
    if (kind < 6) text += kPieces[source() % std::size(kPieces)];
    if (kind == 6) text += static_cast<char>(source());
    if (kind == 7) text += std::string(source() % 90, static_cast<char>('a' + source() % 26));
  }
  return text;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) fail("usage: tokenizer_fuzz TABLES THREADS INPUTS");
  const Tokenizer tokenizer(arguments[1]);
  const Decoder decoder(tokenizer.tables());
  std::vector<std::thread> threads;
  for (int i = 0; i < std::atoi(arguments[2]); ++i)
    threads.emplace_back([&, i] {
      std::mt19937_64 source(static_cast<std::uint64_t>(i));
      for (int n = 0; n < std::atoi(arguments[3]); ++n) try_bytes(tokenizer, decoder, random_bytes(source));
    });
  for (std::thread& thread : threads) thread.join();
  std::puts("ok");
}
#endif
