#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <vector>

#include "formats/hdf5_handles.hpp"
#include "formats/hdf5_library.hpp"
#include "src/core/quote.hpp"

/// Lists the objects of a file, and resolves paths.
namespace pinflow::detail {

namespace hdf5 {

// ---- paths -----------------------------------------------------------------------------------------------

extern "C" ::herr_t pinflow_refuse_other_file(const char* /*file*/, const char* /*group*/,
                                              const char* other_file, const char* /*object*/,
                                              unsigned* /*flags*/, ::hid_t /*access*/, void* noted) {
    try {
        *static_cast<std::string*>(noted) = quote(other_file == nullptr ? "" : other_file);
    } catch (...) {
        return -1;  // it is refused without its name
    }
    return -1;
}

link_access::link_access() : properties_(::H5Pcreate(H5P_LINK_ACCESS), "links cannot be followed") {
    checked(::H5Pset_elink_cb(properties_.id(), pinflow_refuse_other_file, &other_file_),
            "links cannot be followed");
}

std::optional<object_identity> identity_of(::hid_t location, const char* name, const link_access& links) {
    object_identity identity;
#if H5_VERSION_GE(1, 12, 0)
    ::H5O_info2_t info{};
    if (::H5Oget_info_by_name3(location, name, &info, H5O_INFO_BASIC, links.id()) < 0) return std::nullopt;
    identity.token.assign(reinterpret_cast<const char*>(&info.token), sizeof info.token);
#else
    ::H5O_info_t info{};
    if (::H5Oget_info_by_name2(location, name, &info, H5O_INFO_BASIC, links.id()) < 0) return std::nullopt;
    identity.token.assign(reinterpret_cast<const char*>(&info.addr), sizeof info.addr);
#endif
    identity.type = info.type;
    identity.link_count = info.rc;
    return identity;
}

bool is_only_path(const open_file& file, const std::string& name, const link_access& links) {
    for (std::size_t end = name.find('/'); end != name.npos; end = name.find('/', end + 1)) {
        const std::string group = name.substr(0, end);
#if H5_VERSION_GE(1, 12, 0)
        ::H5L_info2_t link{};
        const ::herr_t status = ::H5Lget_info2(file.id(), group.c_str(), &link, links.id());
#else
        ::H5L_info_t link{};
        const ::herr_t status = ::H5Lget_info(file.id(), group.c_str(), &link, links.id());
#endif
        if (status < 0 || link.type != H5L_TYPE_HARD) return false;
        const auto identity = identity_of(file.id(), group.c_str(), links);
        if (!identity || identity->link_count != 1) return false;
    }
    return true;
}

namespace {

constexpr std::size_t max_links = std::size_t{1} << 20;

#if H5_VERSION_GE(1, 12, 0)
using link_info = ::H5L_info2_t;
#else
using link_info = ::H5L_info_t;
#endif

struct link {
    std::string name;
    ::H5L_type_t type;
    std::size_t value_bytes;
};

struct link_collector {
    std::vector<link> links;
    std::size_t max_count = 0;
    std::exception_ptr thrown;
};

extern "C" ::herr_t pinflow_collect_link(::hid_t /*group*/, const char* name, const link_info* info,
                                         void* collector_address) {
    auto& collector = *static_cast<link_collector*>(collector_address);
    try {
        if (collector.links.size() == collector.max_count) {
            throw unsupported(fmt::format("it has more than {} links, too many to list", max_links));
        }
        const bool has_value = info->type != H5L_TYPE_HARD;
        collector.links.push_back({name, info->type, has_value ? info->u.val_size : 0});
    } catch (...) {
        collector.thrown = std::current_exception();
        return 1;  // ends the iteration, but is no failure
    }
    return 0;
}

/// The names that a group has, for a message about a name that it lacks: "; 'GROUP' has 'a', 'b'". Empty if
/// they cannot be read.
std::string names_in(const open_file& file, const std::string& group, const link_access& links) {
    // in the file's order: for any other, libhdf5 reads and sorts as many links as the file claims to have
    constexpr std::size_t max_names = 10;
    link_collector collector{{}, max_names, nullptr};
    const char* const path = group.empty() ? "/" : group.c_str();
    ::hsize_t position = 0;
#if H5_VERSION_GE(1, 12, 0)
    const ::herr_t status = ::H5Literate_by_name2(file.id(), path, H5_INDEX_NAME, H5_ITER_NATIVE, &position,
                                                  pinflow_collect_link, &collector, links.id());
#else
    const ::herr_t status = ::H5Literate_by_name(file.id(), path, H5_INDEX_NAME, H5_ITER_NATIVE, &position,
                                                 pinflow_collect_link, &collector, links.id());
#endif
    if (status < 0) return {};
    std::vector<std::string> names;
    for (const link& each : collector.links)
        names.push_back(quote(each.name));
    if (names.empty()) names.emplace_back("nothing");
    std::ranges::sort(names);
    return fmt::format("; {} has {}{}", group.empty() ? "it" : quote(group), fmt::join(names, ", "),
                       collector.thrown ? ", ..." : "");
}

}  // namespace

object_handle open_dataset(const open_file& file, const std::string& name, link_access& links) {
    const std::string quoted = quote(name);
    if (name.empty() || name.find('\0') != name.npos) {
        throw invalid_argument(fmt::format("{} is not the name of a dataset", quoted));
    }
    const auto refuse_other_file = [&](const std::string& other_file) {
        throw unsupported(fmt::format("{} leads to another file, {}, which is not opened; open that instead",
                                      quoted, other_file));
    };
    links.take_other_file();
    for (std::size_t end = name.find('/'); end != 0; end = end == name.npos ? 0 : name.find('/', end + 1)) {
        const std::string part = name.substr(0, end);
        const ::htri_t exists = ::H5Lexists(file.id(), part.c_str(), links.id());
        if (exists < 0) fail(fmt::format("the path {} cannot be followed at {}", quoted, quote(part)));
        if (exists == 0) {
            const std::size_t slash = part.rfind('/');
            throw invalid_argument(
                fmt::format("there is nothing called {} in it{}", quote(part),
                            names_in(file, slash == part.npos ? "" : part.substr(0, slash), links)));
        }
        const auto found = identity_of(file.id(), part.c_str(), links);
        if (const std::string other_file = links.take_other_file(); !other_file.empty())
            refuse_other_file(other_file);
        if (!found) {
            const std::string words = report_failure().description;
            if (::H5Oexists_by_name(file.id(), part.c_str(), links.id()) == 0) {
                throw invalid_argument(fmt::format("{} is a link that leads nowhere", quote(part)));
            }
            throw format_error(fmt::format("{} cannot be opened: libhdf5 says '{}'", quote(part), words));
        }
        const bool is_last = end == name.npos;
        if (found->type == (is_last ? H5O_TYPE_DATASET : H5O_TYPE_GROUP)) continue;
        if (found->type != H5O_TYPE_DATASET && found->type != H5O_TYPE_GROUP)
            throw invalid_argument(fmt::format("{} is neither a group nor a dataset", quote(part)));
        throw invalid_argument(fmt::format("{} is a {}", quote(part),
                                           is_last ? "group, not a dataset" : "dataset, not a group"));
    }
    return {::H5Oopen(file.id(), name.c_str(), links.id()),
            fmt::format("the dataset {} cannot be opened", quoted)};
}

// ---- all that is in a file -------------------------------------------------------------------------------

namespace {

/// Limit on nested groups.
constexpr std::size_t max_depth = 256;
/// Longer link targets are left out of the report.
constexpr std::size_t max_target_bytes = 4096;

enum class lister_output { datasets, aliases };

class lister {
 public:
    lister(const open_file& file, lister_output output) : file_(file), output_(output) {}
    /// Visits all groups. Call it once.
    void list();
    std::vector<array_listing> take_listings() { return std::move(listings_); }
    std::vector<hdf5_alias> take_aliases() { return std::move(aliases_); }

 private:
    struct open_group {
        std::string path;  ///< with a slash at its end; empty for the root
        object_handle group;
        std::vector<link> links;
        std::size_t next = 0;
    };

    void enter(object_handle group, std::string path);
    void add(const open_group& at, const link& found);
    void add_dataset(const open_group& at, const link& found, const std::string& path);
    void add_soft_link(const open_group& at, const link& found, const std::string& path);
    void refuse(const std::string& path, std::string reason);
    std::string not_followed_reason(const open_group& at, const link& found, const std::string& path);

    const open_file& file_;
    lister_output output_;
    link_access links_;
    std::map<std::string, std::string> seen_;  ///< token of an object to the first path that reached it
    std::vector<open_group> open_groups_;      // from the root down
    std::size_t links_left_ = max_links;
    bool gave_up_ = false;
    std::vector<array_listing> listings_;
    std::vector<hdf5_alias> aliases_;
    std::vector<std::pair<std::string, std::string>> soft_links_;  ///< to datasets: path and token
};

void lister::refuse(const std::string& path, std::string reason) {
    array_listing& listing = listings_.emplace_back();
    listing.name = path;
    listing.reason = std::move(reason);
}

void lister::enter(object_handle group, std::string path) {
    link_collector collector{{}, links_left_, nullptr};
#if H5_VERSION_GE(1, 12, 0)
    const ::herr_t status =
        ::H5Literate2(group.id(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, pinflow_collect_link, &collector);
#else
    const ::herr_t status =
        ::H5Literate(group.id(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, pinflow_collect_link, &collector);
#endif
    if (collector.thrown) {
        gave_up_ = true;
        std::rethrow_exception(collector.thrown);
    }
    checked(status, path.empty() ? "its groups cannot be read"
                                 : fmt::format("the group {} cannot be read", quote(path)));
    links_left_ -= collector.links.size();
    // not by libhdf5, which crashes on an index that claims more links than there are
    std::ranges::sort(collector.links, {}, &link::name);
    open_groups_.push_back({std::move(path), std::move(group), std::move(collector.links), 0});
}

/// Why a link is not followed. Empty for a soft link to an object in the file: the object is listed under its
/// own hard link.
std::string lister::not_followed_reason(const open_group& at, const link& found, const std::string& path) {
    if (found.type != H5L_TYPE_SOFT && found.type != H5L_TYPE_EXTERNAL) {
        return fmt::format("the link {} is of a kind that pinflow does not know", quote(path));
    }
    std::string value(std::min(found.value_bytes, max_target_bytes), '\0');
    std::string target;
    if (value.size() == found.value_bytes &&
        ::H5Lget_val(at.group.id(), found.name.c_str(), value.data(), value.size(), links_.id()) >= 0) {
        if (found.type == H5L_TYPE_SOFT) {
            target = quote(std::string_view(value).substr(0, value.find('\0')));
        } else {
            unsigned flags = 0;
            const char* other_file = nullptr;
            const char* object = nullptr;
            if (::H5Lunpack_elink_val(value.data(), value.size(), &flags, &other_file, &object) >= 0) {
                return fmt::format("the link {} leads to {} in another file, {}, which is not opened",
                                   quote(path), quote(object), quote(other_file));
            }
        }
    }
    if (found.type == H5L_TYPE_EXTERNAL) {
        return fmt::format("the link {} leads to another file, which is not opened", quote(path));
    }
    links_.take_other_file();
    if (identity_of(at.group.id(), found.name.c_str(), links_)) return {};
    const std::string words = report_failure().description;
    if (const std::string other_file = links_.take_other_file(); !other_file.empty()) {
        return fmt::format("the link {} leads to another file, {}, which is not opened", quote(path),
                           other_file);
    }
    if (target.empty()) target = "a path";
    if (::H5Oexists_by_name(at.group.id(), found.name.c_str(), links_.id()) == 0) {
        return fmt::format("the link {} leads to {}, where there is nothing", quote(path), target);
    }
    return fmt::format("the link {} leads to {}, which cannot be opened: libhdf5 says '{}'", quote(path),
                       target, words);
}

void lister::add_dataset(const open_group& at, const link& found, const std::string& path) {
    const object_handle dataset(::H5Oopen(at.group.id(), found.name.c_str(), links_.id()),
                                fmt::format("the dataset {} cannot be opened", quote(path)));
    listings_.push_back(hdf5_listing(describe(file_, dataset, path, detail_wanted::listing)));
}

/// Links to groups, to other files and to nothing are left out.
void lister::add_soft_link(const open_group& at, const link& found, const std::string& path) {
    if (found.type != H5L_TYPE_SOFT) return;
    const auto identity = identity_of(at.group.id(), found.name.c_str(), links_);
    const bool is_inside = links_.take_other_file().empty();
    if (identity && is_inside && identity->type == H5O_TYPE_DATASET)
        soft_links_.emplace_back(path, identity->token);
}

void lister::add(const open_group& at, const link& found) {
    const std::string path = at.path + found.name;
    if (found.type != H5L_TYPE_HARD) {
        if (output_ == lister_output::aliases) return add_soft_link(at, found, path);
        if (std::string reason = not_followed_reason(at, found, path); !reason.empty())
            refuse(path, std::move(reason));
        return;
    }
    try {
        const auto identity = identity_of(at.group.id(), found.name.c_str(), links_);
        if (!identity) fail(fmt::format("{} cannot be opened", quote(path)));
        const auto [seen, is_new] = seen_.emplace(identity->token, path);
        const bool is_dataset = identity->type == H5O_TYPE_DATASET;
        if (!is_new && is_dataset && output_ == lister_output::aliases)
            aliases_.push_back({path, seen->second});
        if (!is_new) return;
        if (is_dataset && output_ == lister_output::datasets) add_dataset(at, found, path);
        if (identity->type != H5O_TYPE_GROUP) return;
        if (open_groups_.size() > max_depth) {
            throw unsupported(fmt::format("the group {} is nested in more than {} groups, and is not listed",
                                          quote(path), max_depth));
        }
        enter({::H5Oopen(at.group.id(), found.name.c_str(), links_.id()),
               fmt::format("the group {} cannot be opened", quote(path))},
              path + '/');  // `at` is invalid from here on
    } catch (const format_error& failure) {
        refuse(path, failure.what());
    } catch (const unsupported& failure) {
        if (gave_up_) throw;
        refuse(path, failure.what());
    }
}

void lister::list() {
    const auto root = identity_of(file_.id(), "/", links_);
    if (!root) fail("its root cannot be read");
    seen_.emplace(root->token, "/");
    enter({::H5Oopen(file_.id(), "/", links_.id()), "its root cannot be opened"}, {});
    while (!open_groups_.empty()) {
        open_group& at = open_groups_.back();
        if (at.next == at.links.size()) {
            open_groups_.pop_back();
        } else {
            const link found = std::move(at.links[at.next++]);
            add(at, found);
        }
    }
    for (const auto& [path, token] : soft_links_) {
        if (const auto dataset = seen_.find(token); dataset != seen_.end())
            aliases_.push_back({path, dataset->second});
    }
}

}  // namespace

}  // namespace hdf5

std::vector<array_listing> list_hdf5_datasets(const input_file& file) {
    return hdf5::naming(file, [&] {
        const hdf5::library_lock lock;
        const hdf5::open_file opened(file, hdf5::default_chunk_cache_bytes);
        hdf5::lister lister(opened, hdf5::lister_output::datasets);
        lister.list();
        return lister.take_listings();
    });
}

std::vector<hdf5_alias> list_hdf5_aliases(const input_file& file) {
    return hdf5::naming(file, [&] {
        const hdf5::library_lock lock;
        const hdf5::open_file opened(file, hdf5::default_chunk_cache_bytes);
        hdf5::lister lister(opened, hdf5::lister_output::aliases);
        lister.list();
        return lister.take_aliases();
    });
}

}  // namespace pinflow::detail
