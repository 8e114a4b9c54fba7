// A catalog of valid items, for one request: dagserve/catalog.py describes the tables.
#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu_nodes.h"
#include "section_file.h"

namespace dagserve {
namespace {

constexpr std::uint32_t kVersion = 1;
constexpr std::uint8_t kEnds = 1, kOpen = 2;
enum class Section : std::size_t {
  sizes,
  first,
  label,
  alphabets,
  alphabet_ends,
  widest,
  marks,
  item_nodes,
  item_offsets,
  items,
  item_order,
};
// The ports of nodes/catalog.py, in its order.
enum Output : std::size_t {
  kFirst,
  kLabel,
  kMarks,
  kAlphabets,
  kAlphabetEnds,
  kChildren,
  kChildrenEnds,
  kItemNodes,
  kItemOffsets,
  kItems,
  kPermitted,
  kOutputs,
};

// What a request may have: two bits a node and a bit an item.
class Selection {
 public:
  Selection(std::uint8_t* marks, std::uint8_t* permitted) : marks_(marks), permitted_(permitted) {}

  std::uint8_t marks(std::size_t node) const { return marks_[node / 4] >> node % 4 * 2 & 3; }
  void mark(std::size_t node, std::uint8_t bits) {
    marks_[node / 4] |= static_cast<std::uint8_t>(bits << node % 4 * 2);
  }
  void unmark(std::size_t node, std::uint8_t bits) {
    marks_[node / 4] &= static_cast<std::uint8_t>(~(bits << node % 4 * 2));
  }
  bool permits(std::size_t item) const { return (permitted_[item / 8] >> item % 8 & 1) != 0; }
  void permit(std::size_t item) { permitted_[item / 8] |= static_cast<std::uint8_t>(1 << item % 8); }
  void forbid(std::size_t item) { permitted_[item / 8] &= static_cast<std::uint8_t>(~(1 << item % 8)); }

 private:
  std::uint8_t* marks_;
  std::uint8_t* permitted_;
};

class CatalogNode final : public CpuNode {
 public:
  explicit CatalogNode(const Config& config)
      : file_(path_of(config), "DAGITEMS", kVersion, "catalog tables"),
        max_nodes_(static_cast<std::size_t>(config.output_bounds.at(kLabel).bound[0])),
        max_items_(static_cast<std::size_t>(config.output_bounds.at(kItemNodes).bound[0])) {
    const auto depth = static_cast<std::size_t>(config.at<std::int64_t>("max_depth"));
    allow_ = port(config, "allow");
    deny_ = port(config, "deny");
    if (config.outputs.size() != kOutputs) throw std::invalid_argument("catalog: another number of outputs");
    read();
    extend(depth, config.at<std::int64_t>("max_children"));
  }

  std::size_t workspace_bytes() const override { return padded((max_nodes_ + 3) / 4) + (max_items_ + 7) / 8; }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
           Status&) const noexcept override {
    const Tensor* const allow = given(inputs, allow_);
    const Tensor* const deny = given(inputs, deny_);
    auto* marks = const_cast<std::uint8_t*>(marks_.data());
    auto* permitted = const_cast<std::uint8_t*>(all_.data());
    if (allow || deny) {
      marks = reinterpret_cast<std::uint8_t*>(workspace.data());
      permitted = marks + padded((max_nodes_ + 3) / 4);
      Selection selection(marks, permitted);
      if (allow) {
        std::memset(marks, 0, marks_.size());
        std::memset(permitted, 0, all_.size());
        for (std::int64_t row = 0; row < allow->rows(); ++row) admit(find(allow->text(row)), selection);
      } else {
        std::ranges::copy(marks_, marks);
        std::ranges::copy(all_, permitted);
      }
      for (std::int64_t row = 0; deny && row < deny->rows(); ++row) take_away(find(deny->text(row)), selection);
    }
    lend(first_, outputs[kFirst]);
    lend(label_, outputs[kLabel]);
    lend(std::span<const std::uint8_t>(marks, marks_.size()), outputs[kMarks]);
    lend(std::span<const std::int32_t>(alphabets_), outputs[kAlphabets]);
    lend(std::span<const std::int32_t>(alphabet_ends_), outputs[kAlphabetEnds]);
    lend(std::span<const std::int32_t>(children_), outputs[kChildren]);
    lend(std::span<const std::int32_t>(children_ends_), outputs[kChildrenEnds]);
    lend(item_nodes_, outputs[kItemNodes]);
    lend(item_offsets_, outputs[kItemOffsets]);
    lend(items_, outputs[kItems]);
    lend(std::span<const std::uint8_t>(permitted, all_.size()), outputs[kPermitted]);
  }

 private:
  static constexpr std::size_t kNone = ~std::size_t{0};

  // Relative to the artifact, unless another catalog was put in the place of the artifact's.
  static std::string path_of(const Config& config) {
    const auto& path = config.at<std::string>("tables");
    return path.starts_with("/") ? path : config.root + "/" + path;
  }

  static std::size_t padded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

  static std::ptrdiff_t port(const Config& config, std::string_view name) {
    const auto found = std::ranges::find(config.inputs, name);
    return found == config.inputs.end() ? -1 : found - config.inputs.begin();
  }

  static const Tensor* given(std::span<const Tensor> inputs, std::ptrdiff_t index) {
    return index >= 0 && inputs[static_cast<std::size_t>(index)].present ? &inputs[static_cast<std::size_t>(index)]
                                                                         : nullptr;
  }

  template <class T>
  static void lend(std::span<const T> values, Tensor& output) {
    output.data = const_cast<T*>(values.data());
    output.shape[0] = std::ssize(values);
  }

  template <class T>
  std::span<const T> array(Section section) const {
    return file_.array<T>(static_cast<std::size_t>(section));
  }

  void consistent(bool right) const {
    if (!right) file_.refuse("are inconsistent: compile the manifest again");
  }

  // Everything that run() and the packages index with is checked here, once.
  void read() {
    const auto sizes = array<std::uint32_t>(Section::sizes);
    consistent(sizes.size() == 4 && sizes[0] >= 1 && sizes[1] >= 2 && sizes[3] >= 1);
    levels_ = sizes[0];
    const std::size_t nodes = sizes[1], above = sizes[2], items = sizes[3];
    if (items > max_items_ || nodes > max_nodes_)
      file_.refuse("have " + std::to_string(items) + " items, over max_items, " + std::to_string(max_items_));
    first_ = array<std::int32_t>(Section::first);
    label_ = array<std::int32_t>(Section::label);
    marks_ = array<std::uint8_t>(Section::marks);
    widest_ = array<std::int32_t>(Section::widest);
    item_nodes_ = array<std::int32_t>(Section::item_nodes);
    item_offsets_ = array<std::int32_t>(Section::item_offsets);
    items_ = array<std::uint8_t>(Section::items);
    item_order_ = array<std::uint32_t>(Section::item_order);
    const auto alphabets = array<std::int32_t>(Section::alphabets);
    const auto alphabet_ends = array<std::int32_t>(Section::alphabet_ends);
    consistent(first_.size() == above + 1 && label_.size() == nodes && marks_.size() == (nodes + 3) / 4 &&
               widest_.size() == levels_ && alphabet_ends.size() == levels_ + 1 && item_nodes_.size() == items &&
               item_offsets_.size() == items + 1 && item_order_.size() == items);
    consistent(first_[0] == 1 && static_cast<std::size_t>(first_.back()) == nodes && std::ranges::is_sorted(first_));
    consistent(alphabet_ends[0] == 0 && static_cast<std::size_t>(alphabet_ends.back()) == alphabets.size() &&
               std::ranges::adjacent_find(alphabet_ends, std::ranges::greater_equal{}) == alphabet_ends.end());
    consistent(std::ranges::all_of(widest_, [](std::int32_t count) { return count >= 1; }));
    consistent(std::ranges::is_sorted(item_nodes_) && item_nodes_[0] >= 1 &&
               static_cast<std::size_t>(item_nodes_.back()) < nodes);
    consistent(item_offsets_[0] == 0 && std::ranges::is_sorted(item_offsets_) &&
               static_cast<std::size_t>(item_offsets_.back()) == items_.size());
    consistent(std::ranges::all_of(item_order_, [&](std::uint32_t item) { return item < items; }));
    alphabets_.assign(alphabets.begin(), alphabets.end());
    alphabet_ends_.assign(alphabet_ends.begin(), alphabet_ends.end());
    check_labels();
    all_.assign((items + 7) / 8, 0xFF);
    if (items % 8) all_.back() = static_cast<std::uint8_t>((1 << items % 8) - 1);
  }

  // A node's label is a row of its level's alphabet. A level ends where the children of the level above end.
  void check_labels() const {
    std::size_t begin = 1;
    std::size_t end = static_cast<std::size_t>(first_[1]);
    for (std::size_t level = 0; level < levels_; ++level) {
      const std::int32_t rows = alphabet_ends_[level + 1] - alphabet_ends_[level];
      consistent(begin < end && end <= label_.size());
      consistent(std::ranges::all_of(label_.subspan(begin, end - begin),
                                     [&](std::int32_t row) { return row >= 0 && row < rows; }));
      begin = end;
      end = static_cast<std::size_t>(first_[std::min(end, first_.size() - 1)]);
    }
    consistent(begin == label_.size());
  }

  // The tables of levels, as deep as the graph is: levels that the catalog does not reach have one row, never looked
  // at.
  void extend(std::size_t depth, std::int64_t max_children) {
    if (levels_ > depth)
      file_.refuse("have items of " + std::to_string(levels_) + " tokens, over max_depth, " + std::to_string(depth));
    children_ends_.push_back(0);
    for (std::size_t level = 0; level < depth; ++level) {
      if (level >= levels_) {
        alphabets_.push_back(0);
        alphabet_ends_.push_back(alphabet_ends_.back() + 1);
      }
      const std::int32_t count = level < levels_ ? widest_[level] : 1;
      if (count > max_children)
        file_.refuse("have " + std::to_string(count) + " next tokens after one beginning, over max_children, " +
                     std::to_string(max_children));
      for (std::int32_t i = 0; i < count; ++i) children_.push_back(i);
      children_ends_.push_back(children_ends_.back() + count);
    }
  }

  std::string_view name(std::size_t item) const {
    return {reinterpret_cast<const char*>(items_.data()) + item_offsets_[item],
            static_cast<std::size_t>(item_offsets_[item + 1] - item_offsets_[item])};
  }

  // The item of that id, or kNone.
  std::size_t find(std::string_view id) const {
    const auto found = std::ranges::lower_bound(item_order_, id, {}, [&](std::uint32_t item) { return name(item); });
    return found == item_order_.end() || name(*found) != id ? kNone : *found;
  }

  // The node above another; first_ ascends, and of equal entries the last is the one with children.
  std::size_t parent(std::size_t node) const {
    const auto after = std::ranges::upper_bound(first_, static_cast<std::int32_t>(node));
    return static_cast<std::size_t>(after - first_.begin()) - 1;
  }

  // Permits an item and opens what leads to it.
  void admit(std::size_t item, Selection& selection) const {
    if (item == kNone) return;
    selection.permit(item);
    auto node = static_cast<std::size_t>(item_nodes_[item]);
    selection.mark(node, kEnds);
    while (node != 0) {
      node = parent(node);
      if (selection.marks(node) & kOpen) break;
      selection.mark(node, kOpen);
    }
  }

  // Forbids an item; nodes that lead to nothing permitted any more are closed, upwards.
  void take_away(std::size_t item, Selection& selection) const {
    if (item == kNone || !selection.permits(item)) return;
    selection.forbid(item);
    const std::int32_t end = item_nodes_[item];
    const auto [begin, after] = std::equal_range(item_nodes_.begin(), item_nodes_.end(), end);
    for (auto at = begin; at != after; ++at)
      if (selection.permits(static_cast<std::size_t>(at - item_nodes_.begin()))) return;
    auto node = static_cast<std::size_t>(end);
    selection.unmark(node, kEnds);
    while (node != 0 && selection.marks(node) == 0) {
      node = parent(node);
      for (auto child = first_[node]; child < first_[node + 1]; ++child)
        if (selection.marks(static_cast<std::size_t>(child)) != 0) return;
      selection.unmark(node, kOpen);
    }
  }

  SectionFile file_;
  std::size_t max_nodes_, max_items_;
  std::size_t levels_ = 0;
  std::ptrdiff_t allow_ = -1, deny_ = -1;
  std::span<const std::int32_t> first_, label_, widest_, item_nodes_, item_offsets_;
  std::span<const std::uint8_t> marks_, items_;
  std::span<const std::uint32_t> item_order_;
  std::vector<std::int32_t> alphabets_, alphabet_ends_, children_, children_ends_;
  std::vector<std::uint8_t> all_;  // every item permitted
};

}  // namespace

std::unique_ptr<CpuNode> make_catalog_node(const Config& config) { return std::make_unique<CatalogNode>(config); }

}  // namespace dagserve
