// A kernel driver named nvidia. It binds to display functions of vendor 10de and lists them in /proc/driver/nvidia. Like
// the real driver, its remove waits until no process has /dev/nvidiaN open, and signals do not interrupt it.
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define MOST 16
#define CONTROL 255
#define MODESET 254
#define VERSION "580.95.05"

static char *order[MOST], *uuids[MOST];
static int ordered, named;
module_param_array(order, charp, &ordered, 0444);
MODULE_PARM_DESC(order, "Bus IDs in the order of minors");
module_param_array(uuids, charp, &named, 0444);
MODULE_PARM_DESC(uuids, "The UUIDs in the same order");
static int slow_ms;
module_param(slow_ms, int, 0644);
MODULE_PARM_DESC(slow_ms, "How long probe and remove take");

struct card {
	struct pci_dev *dev;
	struct proc_dir_entry *dir;
	atomic_t users;
	bool removing;
};

static struct card cards[MOST];
static DEFINE_MUTEX(lock);
static struct proc_dir_entry *top, *gpus;

static int information(struct seq_file *file, void *unused)
{
	struct card *card = file->private;
	int minor = card - cards;

	seq_printf(file, "Model: \t\t NVIDIA L40S\nIRQ:   \t\t %d\nGPU UUID: \t %s\nBus Type: \t PCIe\n",
		   card->dev->irq, minor < named ? uuids[minor] : "?");
	seq_printf(file, "Bus Location: \t %s\nDevice Minor: \t %d\nGPU Excluded:\t No\n", pci_name(card->dev), minor);
	return 0;
}

static int version(struct seq_file *file, void *unused)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " VERSION "  Tue Apr  8 12:41:17 UTC 2025\n");
	seq_puts(file, "GCC version:  gcc version 12.2.0\n");
	return 0;
}

static int probe(struct pci_dev *dev, const struct pci_device_id *id)
{
	struct card *card = NULL;
	int minor;

	if (slow_ms)
		msleep(slow_ms);
	mutex_lock(&lock);
	for (minor = 0; minor < ordered && !card; minor++)
		if (!strcmp(order[minor], pci_name(dev)) && !cards[minor].dev)
			card = &cards[minor];
	if (card) {
		card->dev = dev;
		card->removing = false;
		atomic_set(&card->users, 0);
		card->dir = proc_mkdir(pci_name(dev), gpus);
		proc_create_single_data("information", 0444, card->dir, information, card);
	}
	mutex_unlock(&lock);
	if (!card)
		return -ENODEV;
	pci_set_drvdata(dev, card);
	return pci_enable_device(dev);
}

static void remove(struct pci_dev *dev)
{
	struct card *card = pci_get_drvdata(dev);

	if (slow_ms)
		msleep(slow_ms);
	mutex_lock(&lock);
	card->removing = true;
	mutex_unlock(&lock);
	while (atomic_read(&card->users))
		msleep(50);
	proc_remove(card->dir);
	pci_disable_device(dev);
	mutex_lock(&lock);
	card->dev = NULL;
	mutex_unlock(&lock);
}

static int open_node(struct inode *inode, struct file *file)
{
	int minor = iminor(inode), code = 0;

	if (minor == CONTROL || minor == MODESET)
		return 0;
	if (minor >= MOST)
		return -ENXIO;
	mutex_lock(&lock);
	if (!cards[minor].dev || cards[minor].removing) {
		code = -EIO;
	} else {
		atomic_inc(&cards[minor].users);
		file->private_data = &cards[minor];
	}
	mutex_unlock(&lock);
	return code;
}

static int close_node(struct inode *inode, struct file *file)
{
	struct card *card = file->private_data;

	if (card)
		atomic_dec(&card->users);
	return 0;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE, .open = open_node, .release = close_node
};
static const struct pci_device_id ids[] = {
	{ PCI_VENDOR_ID_NVIDIA, PCI_ANY_ID, PCI_ANY_ID, PCI_ANY_ID, 0x030000, 0xff0000 }, { }
};
MODULE_DEVICE_TABLE(pci, ids);
static struct pci_driver driver = { .name = "nvidia", .id_table = ids, .probe = probe, .remove = remove };

static int __init start(void)
{
	int code = register_chrdev(195, "nvidia", &operations);

	if (code < 0)
		return code;
	top = proc_mkdir("driver/nvidia", NULL);
	gpus = proc_mkdir("gpus", top);
	proc_create_single_data("version", 0444, top, version, NULL);
	return pci_register_driver(&driver);
}

static void __exit stop(void)
{
	pci_unregister_driver(&driver);
	proc_remove(top);
	unregister_chrdev(195, "nvidia");
}

module_init(start);
module_exit(stop);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(VERSION);
